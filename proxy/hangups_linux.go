package proxy

import (
	"net"
	"sync"
	"syscall"
)

// hangupSet is an epoll set of connections and the goroutine that waits on it.
type hangupSet struct {
	mu     sync.Mutex
	epfd   int // -1 = not started
	closed bool
	wake   [2]int // a pipe that ends the wait
	conns  map[int32]hangupEntry
	next   int32
	done   chan struct{}
}

type hangupEntry struct {
	c   *wireServerConn
	gen int32 // tells a descriptor's lives apart
}

func newHangups() *hangups {
	h := &hangups{}
	h.epfd = -1
	return h
}

// start makes the set with the first connection that can be in it: in-memory networks never do, and a wait in the
// kernel would stop a synctest bubble's clock.
func (h *hangups) start() error {
	epfd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	if err = syscall.Pipe2(h.wake[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err == nil {
		ev := syscall.EpollEvent{Events: syscall.EPOLLIN, Fd: int32(h.wake[0]), Pad: -1}
		err = syscall.EpollCtl(epfd, syscall.EPOLL_CTL_ADD, h.wake[0], &ev)
	}
	if err != nil {
		_ = syscall.Close(epfd)
		return err
	}
	h.epfd, h.conns, h.done = epfd, make(map[int32]hangupEntry), make(chan struct{})
	go h.run(epfd)
	return nil
}

func (h *hangups) run(epfd int) {
	defer close(h.done)
	var evs [64]syscall.EpollEvent
	for {
		n, err := syscall.EpollWait(epfd, evs[:], -1)
		if err != nil && err != syscall.EINTR {
			return
		}
		for _, ev := range evs[:max(n, 0)] {
			if ev.Pad == -1 {
				return
			}
			h.mu.Lock()
			e, ok := h.conns[ev.Fd]
			h.mu.Unlock()
			if ok && e.gen == ev.Pad {
				e.c.hungUp()
			}
		}
	}
}

// watch begins to watch a connection; false means that it cannot be watched.
func (h *hangups) watch(c *wireServerConn) bool {
	fd, ok := descriptor(c.nc)
	if !ok {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || h.epfd < 0 && h.start() != nil {
		return false
	}
	if h.next++; h.next < 0 {
		h.next = 0
	}
	// Edge-triggered: one event for the end of the other side, none for data.
	ev := syscall.EpollEvent{Events: syscall.EPOLLRDHUP | epollET, Fd: fd, Pad: h.next}
	if syscall.EpollCtl(h.epfd, syscall.EPOLL_CTL_ADD, int(fd), &ev) != nil {
		return false
	}
	h.conns[fd] = hangupEntry{c, h.next}
	return true
}

const epollET = 1 << 31

// forget must be called before the connection is closed or handed on.
func (h *hangups) forget(c *wireServerConn) {
	fd, ok := descriptor(c.nc)
	if !ok {
		return // closed by Shutdown; the kernel has taken it out of the set
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conns[fd].c == c {
		delete(h.conns, fd)
		_ = syscall.EpollCtl(h.epfd, syscall.EPOLL_CTL_DEL, int(fd), nil) // it may be gone already
	}
}

// close ends the watch.
func (h *hangups) close() {
	h.mu.Lock()
	epfd := h.epfd
	h.closed, h.epfd = true, -1
	h.mu.Unlock()
	if epfd < 0 {
		return
	}
	_, _ = syscall.Write(h.wake[1], []byte{0})
	<-h.done
	for _, fd := range []int{epfd, h.wake[0], h.wake[1]} {
		_ = syscall.Close(fd)
	}
}

// descriptor is a connection's file descriptor.
func descriptor(nc net.Conn) (int32, bool) {
	sc, ok := below(nc).(syscall.Conn)
	if !ok {
		return 0, false
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return 0, false
	}
	fd := int32(-1)
	_ = rc.Control(func(f uintptr) { fd = int32(f) })
	return fd, fd >= 0
}
