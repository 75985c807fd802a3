//go:build unix

package proxy

import (
	"net"
	"syscall"
)

// peekConn looks at what waits on a connection without taking it.
func peekConn(nc net.Conn) waiting {
	nc = below(nc)
	if s, is := nc.(*sock); is {
		return s.look()
	}
	sc, is := nc.(syscall.Conn)
	if !is {
		return waitUnknown
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return waitUnknown
	}
	var (
		b [1]byte
		n int
	)
	if rc.Control(func(fd uintptr) {
		n, _, err = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	}) != nil {
		return waitClosed
	}
	switch {
	case err == syscall.EAGAIN || err == syscall.EINTR:
		return waitNothing
	case err != nil || n == 0:
		return waitClosed
	}
	return waitData
}
