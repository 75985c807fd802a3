package proxy

import (
	"net"
	"sync"
	"syscall"
)

// hangupSet is an epoll set of connections and the goroutine that waits on it.
type hangupSet struct {
	mu    sync.Mutex
	users int    // servers that are open
	epfd  int    // -1 = not started
	wake  [2]int // a pipe that ends the wait
	conns map[int32]hangupEntry
	next  int32
	done  chan struct{}
}

type hangupEntry struct {
	e   ender
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
	go h.run(epfd, h.done)
	return nil
}

func (h *hangups) run(epfd int, done chan struct{}) {
	defer close(done)
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
				e.e.hungUp()
			}
		}
	}
}

// open lets connections be watched until as many calls of shut.
func (h *hangups) open() {
	h.mu.Lock()
	h.users++
	h.mu.Unlock()
}

// watch begins to watch a connection, if that has not begun already; false means that it cannot be watched.
func (h *hangups) watch(nc net.Conn, e ender) bool {
	sc, ok := below(nc).(syscall.Conn)
	if !ok {
		return false
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	ok = false
	_ = rc.Control(func(fd uintptr) { ok = h.add(int32(fd), e) }) // the number stays the connection's meanwhile
	return ok
}

func (h *hangups) add(fd int32, e ender) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conns[fd].e == e {
		return true
	}
	if h.users == 0 || h.epfd < 0 && h.start() != nil {
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
	h.conns[fd] = hangupEntry{e, h.next}
	return true
}

const epollET = 1 << 31

// forget must be called before the connection is closed or handed on.
func (h *hangups) forget(nc net.Conn, e ender) {
	fd, ok := descriptor(nc)
	if !ok {
		return // closed by Shutdown; the kernel has taken it out of the set
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conns[fd].e == e {
		delete(h.conns, fd)
		_ = syscall.EpollCtl(h.epfd, syscall.EPOLL_CTL_DEL, int(fd), nil) // it may be gone already
	}
}

// shut undoes open; the last one ends the watch.
func (h *hangups) shut() {
	h.mu.Lock()
	h.users--
	if h.users > 0 || h.epfd < 0 {
		h.mu.Unlock()
		return
	}
	epfd, wake, done := h.epfd, h.wake, h.done
	h.epfd, h.conns = -1, nil
	h.mu.Unlock()
	_, _ = syscall.Write(wake[1], []byte{0})
	<-done
	for _, fd := range []int{epfd, wake[0], wake[1]} {
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
