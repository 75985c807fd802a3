package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// hangupSet is an epoll set of connections and the goroutine that waits on it. It watches clients for their end, and reads the
// established event streams (pump).
//
// While there is traffic, its wait does not tell the scheduler that it enters the kernel: the runtime's monitor thread would
// take its place among the running (its P) away, and would have to be woken with each piece. So it keeps a P, and there must be
// two at least. Nobody has to wait for it: the garbage collector, and whoever else wants goroutines to stop, signal the thread,
// which ends the wait; so does the monitor every 10 ms. When two of these waits brought nothing, the next one is a usual call.
//
// It keeps the P also when requests come and no stream is there: a P that nobody uses has the scheduler wake a thread for
// each goroutine that may run, to look for work that the others have done by then (a third of a request's CPU where one follows
// the other; nothing under full load, which leaves no P idle).
type hangupSet struct {
	keeps bool // a P; false: it reads no streams

	mu    sync.Mutex
	users int           // servers that are open
	epfd  int           // -1 = not started
	wake  [2]int        // a pipe that ends the wait
	conns []hangupEntry // by descriptor
	next  int32
	done  chan struct{}

	crowded  atomic.Bool    // there is one P only
	requests atomic.Uint32  // since the last wait's end
	resting  atomic.Bool    // it waits without a P, and should be told of busyFrom requests
	piece    [16 << 10]byte // what was read last
}

type hangupEntry struct {
	e   any   // ender or *pump
	gen int32 // tells a descriptor's lives apart, 1 and more
}

// busyFrom is how many requests end a rest: one alone is not worth a call.
const busyFrom = 16

// What the pipe brings.
const (
	wakeEnd = iota
	wakeBusy
)

// newHangups makes a set; keeps lets it keep a P while there is traffic.
func newHangups(keeps bool) *hangups {
	h := &hangups{}
	h.epfd, h.keeps = -1, keeps && !noSignals
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
	h.epfd, h.done = epfd, make(chan struct{})
	go h.run(epfd, h.wake[0], h.done)
	return nil
}

func (h *hangups) run(epfd, wake int, done chan struct{}) {
	defer close(done)
	var (
		evs   [128]syscall.EpollEvent
		quiet int // waits that brought nothing
	)
	for {
		stay := h.keeps && quiet < 2 && !h.crowded.Load()
		h.resting.Store(!stay)
		n, e := epollWait(epfd, evs[:], stay)
		switch {
		case e == syscall.EINTR:
			if quiet++; h.requests.Swap(0) > 0 {
				quiet = 0
			}
			if stay {
				h.crowded.Store(runtime.GOMAXPROCS(0) < 2)
				runtime.Gosched() // somebody wants us to stop
			}
			continue
		case e != 0:
			return
		}
		quiet = 0
		yield := false // we leave goroutines that are to run in our P's line
		for _, ev := range evs[:n] {
			if ev.Pad == -1 {
				if told(wake) == wakeEnd {
					return
				}
				continue
			}
			h.mu.Lock()
			e := h.entry(ev.Fd)
			h.mu.Unlock()
			if e.gen != ev.Pad {
				continue
			}
			switch e := e.e.(type) {
			case ender:
				e.hungUp()
				yield = true
			case *pump:
				if !e.read(int(ev.Fd), h.piece[:], ev.Events&(syscall.EPOLLRDHUP|syscall.EPOLLHUP|syscall.EPOLLERR) != 0) {
					h.giveBack(ev.Fd, e)
					yield = true
				}
			}
		}
		if yield {
			runtime.Gosched()
		}
	}
}

// request notes that there is traffic.
func (h *hangups) request() {
	if h.keeps && h.requests.Add(1) >= busyFrom && h.resting.Load() && h.resting.CompareAndSwap(true, false) {
		h.tell(wakeBusy)
	}
}

// tell wakes the set, if it works.
func (h *hangups) tell(what byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.epfd >= 0 {
		_, _ = syscall.Write(h.wake[1], []byte{what})
	}
}

// told is what the set was woken for.
func told(wake int) byte {
	b := [1]byte{wakeEnd}
	_, _ = syscall.Read(wake, b[:])
	return b[0]
}

// epollWait waits without an end; stay keeps the P.
func epollWait(epfd int, evs []syscall.EpollEvent, stay bool) (int, syscall.Errno) {
	call := syscall.Syscall6
	if stay {
		call = syscall.RawSyscall6
	}
	n, _, e := call(syscall.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(unsafe.SliceData(evs))), uintptr(len(evs)), ^uintptr(0), 0, 0)
	return int(n), e
}

// relays reports whether it may read streams.
func (h *hangups) relays() bool {
	crowded := runtime.GOMAXPROCS(0) < 2
	h.crowded.Store(crowded)
	return h.keeps && !crowded
}

// noSignals is the setting under which nobody could end a wait that keeps its P.
var noSignals = strings.Contains(os.Getenv("GODEBUG"), "asyncpreemptoff=1")

// take reads for m and gives it what comes until it wants no more; then it calls m.back. With an error it does not.
func (h *hangups) take(m *pump) error {
	s := m.in
	if err := s.leave(); err != nil {
		return err
	}
	if !s.begin() {
		return net.ErrClosed
	}
	events := uint32(syscall.EPOLLIN | syscall.EPOLLRDHUP | epollET)
	if m.secure != nil { // it may have read ahead: that it can be written to is an event at once, and no other one later
		events |= syscall.EPOLLOUT
	}
	err := net.ErrClosed
	if m.out.begin() {
		if h.add(int32(s.own), m, events) {
			return nil
		}
		err = errNotTaken
		m.out.done()
	}
	s.done()
	return err
}

var errNotTaken = errors.New("the stream stays with its goroutine")

// giveBack lets the stream go on without the set.
func (h *hangups) giveBack(fd int32, m *pump) {
	h.mu.Lock()
	h.remove(fd)
	h.mu.Unlock()
	m.back()
}

// mostReads of a stream in one go: then others have their turn.
const mostReads = 64

// read passes on what has come; last means that the other side may have ended behind it. False: the stream needs its
// goroutine.
func (m *pump) read(fd int, p []byte, last bool) (more bool) {
	if m.secure != nil {
		return m.readTLS(p, last)
	}
	for range mostReads {
		n, _, e := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), 0, 0, 0)
		switch {
		case e == syscall.EAGAIN:
			return true
		case e == syscall.EINTR:
			continue
		case e != 0:
			m.end = &net.OpError{Op: "read", Err: os.NewSyscallError("read", e)}
			return false
		case n == 0:
			m.end = io.EOF
			return false
		}
		if !m.take(p[:n]) {
			return false
		}
		if int(n) < len(p) && !last {
			return true // that emptied it
		}
	}
	return false // its goroutine hands it over again
}

// readTLS is read over TLS, which has what a read of the socket brought beyond its record.
func (m *pump) readTLS(p []byte, last bool) (more bool) {
	m.in.dry, m.in.ends = false, last
	for range mostReads {
		n, err := m.secure.Read(p)
		if n > 0 && !m.take(p[:n]) {
			return false
		}
		switch err {
		case nil:
		case errLater:
			return true
		default:
			m.end = err
			return false
		}
	}
	return false
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
	// Edge-triggered: one event for the end of the other side, none for data.
	_ = rc.Control(func(fd uintptr) { ok = h.add(int32(fd), e, syscall.EPOLLRDHUP|epollET) }) // the number stays the connection's meanwhile
	return ok
}

func (h *hangups) add(fd int32, e any, events uint32) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.entry(fd).e == e {
		return true
	}
	if h.users == 0 || h.epfd < 0 && h.start() != nil {
		return false
	}
	if h.next++; h.next < 0 {
		h.next = 1
	}
	ev := syscall.EpollEvent{Events: events, Fd: fd, Pad: h.next}
	if syscall.EpollCtl(h.epfd, syscall.EPOLL_CTL_ADD, int(fd), &ev) != nil {
		return false
	}
	if n := int(fd) + 1 - len(h.conns); n > 0 {
		h.conns = append(h.conns, make([]hangupEntry, n)...)
	}
	h.conns[fd] = hangupEntry{e, h.next}
	return true
}

// entry is what is known of a descriptor; h.mu is held, as for remove.
func (h *hangups) entry(fd int32) (e hangupEntry) {
	if int(fd) < len(h.conns) {
		e = h.conns[fd]
	}
	return e
}

func (h *hangups) remove(fd int32) {
	if int(fd) < len(h.conns) { // else they are all gone
		h.conns[fd] = hangupEntry{}
	}
	_ = syscall.EpollCtl(h.epfd, syscall.EPOLL_CTL_DEL, int(fd), nil) // it may be gone already
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
	if h.entry(fd).e == e {
		h.remove(fd)
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
	_, _ = syscall.Write(wake[1], []byte{wakeEnd})
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
