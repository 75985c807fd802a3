//go:build linux

// Package ev is a thin layer over epoll and raw socket calls, so that the
// engine and the load generator cost as little CPU as possible: both are
// single-threaded loops with no goroutine switch per event.
package ev

import (
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const sysEpollPwait2 = 441

// Cooperative makes Wait enter the kernel through the Go scheduler, so that
// other goroutines and the garbage collector go on while it blocks.
var Cooperative bool

// Poller wraps one epoll instance.
type Poller struct {
	fd  int
	Evs [512]syscall.EpollEvent
}

func NewPoller() *Poller {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		panic(err)
	}
	return &Poller{fd: fd}
}

func (p *Poller) ctl(op, fd int, events uint32) {
	e := syscall.EpollEvent{Events: events, Fd: int32(fd)}
	syscall.EpollCtl(p.fd, op, fd, &e)
}

func (p *Poller) Add(fd int)   { p.ctl(syscall.EPOLL_CTL_ADD, fd, syscall.EPOLLIN) }
func (p *Poller) AddRW(fd int) { p.ctl(syscall.EPOLL_CTL_ADD, fd, syscall.EPOLLIN|syscall.EPOLLOUT) }
func (p *Poller) RW(fd int)    { p.ctl(syscall.EPOLL_CTL_MOD, fd, syscall.EPOLLIN|syscall.EPOLLOUT) }
func (p *Poller) RO(fd int)    { p.ctl(syscall.EPOLL_CTL_MOD, fd, syscall.EPOLLIN) }

// Wait waits for events for at most ns nanoseconds (negative: for ever).
func (p *Poller) Wait(ns int64) int {
	var ts *syscall.Timespec
	var t syscall.Timespec
	if ns >= 0 {
		t = syscall.NsecToTimespec(ns)
		ts = &t
	}
	call := syscall.RawSyscall6
	if Cooperative && ns != 0 {
		// Tell Go's scheduler, as a program with other goroutines must.
		call = syscall.Syscall6
	}
	n, _, e := call(sysEpollPwait2, uintptr(p.fd), uintptr(unsafe.Pointer(&p.Evs[0])),
		uintptr(len(p.Evs)), uintptr(unsafe.Pointer(ts)), 0, 0)
	if e != 0 {
		return 0
	}
	return int(n)
}

// Read and Write return -1 on EAGAIN and -2 on any other error.
func Read(fd int, b []byte) int {
	n, _, e := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return rc(n, e)
}

func Write(fd int, b []byte) int {
	n, _, e := syscall.RawSyscall6(syscall.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		syscall.MSG_NOSIGNAL, 0, 0)
	return rc(n, e)
}

func rc(n uintptr, e syscall.Errno) int {
	switch e {
	case 0:
		return int(n)
	case syscall.EAGAIN, syscall.EINTR:
		return -1
	}
	return -2
}

func addr(hostport string) (syscall.Sockaddr, error) {
	if path, ok := strings.CutPrefix(hostport, "unix:"); ok {
		return &syscall.SockaddrUnix{Name: path}, nil
	}
	a, err := net.ResolveTCPAddr("tcp4", hostport)
	if err != nil {
		return nil, err
	}
	sa := &syscall.SockaddrInet4{Port: a.Port}
	copy(sa.Addr[:], a.IP.To4())
	return sa, nil
}

func Listen(hostport string) (int, error) {
	sa, err := addr(hostport)
	if err != nil {
		return 0, err
	}
	fd, err := syscall.Socket(family(sa), syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err := syscall.Bind(fd, sa); err != nil {
		return 0, fmt.Errorf("bind %s: %w", hostport, err)
	}
	return fd, syscall.Listen(fd, 4096)
}

func Accept(fd int) int {
	nfd, _, err := syscall.Accept4(fd, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
	if err != nil {
		return -1
	}
	syscall.SetsockoptInt(nfd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	return nfd
}

func family(sa syscall.Sockaddr) int {
	if _, ok := sa.(*syscall.SockaddrUnix); ok {
		return syscall.AF_UNIX
	}
	return syscall.AF_INET
}

// Dialer connects over loopback; the handshake ends inside connect(2).
type Dialer struct{ sa syscall.Sockaddr }

func NewDialer(hostport string) (*Dialer, error) {
	sa, err := addr(hostport)
	return &Dialer{sa}, err
}

func (d *Dialer) Dial() (int, error) {
	fd, err := syscall.Socket(family(d.sa), syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := syscall.Connect(fd, d.sa); err != nil {
		syscall.Close(fd)
		return -1, err
	}
	syscall.SetNonblock(fd, true)
	syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	return fd, nil
}

// Now is the wall clock in nanoseconds, the same clock in every process here.
func Now() int64 { return time.Now().UnixNano() }

// RaiseFiles lifts the soft open-file limit to the hard one.
func RaiseFiles() {
	var r syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) == nil {
		r.Cur = r.Max
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &r)
	}
}
