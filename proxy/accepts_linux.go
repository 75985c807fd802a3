package proxy

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	handshakes    = 50 * time.Millisecond // for connections that were begun before, over any network
	acceptBacklog = time.Second           // for those that are made, on a machine that is busy
)

// LastAccepts lets no further connection begin on a TCP listener (not a multipath one), and returns when those that had begun are
// accepted, so that its Close resets none. Serve must still run. A client that comes later is not answered; it tries again after a
// second, as TCP does, and is refused by then. Where the kernel allows no such filter, it returns at once.
func LastAccepts(l net.Listener) {
	sc, ok := l.(syscall.Conn)
	if !ok {
		return
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return
	}
	// Classic BPF, from the TCP header on: a segment with SYN (byte 13, bit 1) is dropped, all others pass.
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 13},
		{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, Jt: 0, Jf: 1, K: 2},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
	}
	if rc.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	}) != nil || err != nil {
		return
	}
	end := time.Now().Add(acceptBacklog)
	for time.Sleep(handshakes); time.Now().Before(end); time.Sleep(handshakes / 5) {
		waiting := uint32(0)
		_ = rc.Control(func(fd uintptr) {
			// Of a listening socket these are the connections that nobody has accepted (tcp(7), net/ipv4/tcp.c).
			if i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				waiting = i.Unacked
			}
		})
		if waiting == 0 {
			return
		}
	}
}
