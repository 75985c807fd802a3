package proxy

import "syscall"

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), which package syscall does not have on every architecture.
const tcpUserTimeout = 18

// dropWhenCut ends a connection whose data nobody acknowledges for cutAfter. Keep-alive probes go out on idle connections
// only; what was written just after a cut would wait for the kernel's retransmissions, a quarter of an hour. A kernel that
// does not take the option keeps its own limits.
func dropWhenCut(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(cutAfter.Milliseconds()))
	})
}
