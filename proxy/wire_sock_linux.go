package proxy

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// shortCall is up to which size a read or write does not tell the scheduler that it is in the kernel: the descriptor
// never blocks, and so many bytes are copied in some microseconds.
const shortCall = 64 << 10

// sock is a TCP or Unix connection whose reads and writes are plain calls on its descriptor. Waiting stays with Go's
// poller. What it saves is the scheduler's part of a system call: on a lightly loaded agent every entry wakes the
// runtime's monitor thread, which costs more than the call (measured: 10 of 35 µs for a streamed chunk).
//
// One goroutine reads and one writes at a time.
type sock struct {
	net.Conn
	raw  syscall.RawConn
	in   call
	out  call
	gf   func(fd uintptr) bool
	gp   *[]byte
	pool *sync.Pool

	af    func(fd uintptr) bool // of ask
	asked bool
	used  bool
	seen  waiting
	lf    func(fd uintptr) // of look

	of func(fd uintptr) // of writeNow

	// A descriptor of the connection that Go's poller does not know, see hangups.relay.
	mu   sync.Mutex
	left bool // there is one
	own  int
	away bool // the set reads from it
	shut bool // Close has come meanwhile
}

// call is one read or write under way; f lives as long as the connection, so that a call allocates nothing.
type call struct {
	f   func(fd uintptr) bool
	p   []byte
	n   int
	err error
}

// fastConn returns nc with cheaper calls where there are any.
func fastConn(nc net.Conn) net.Conn {
	switch nc.(type) {
	case *net.TCPConn, *net.UnixConn:
	default:
		return nc
	}
	raw, err := nc.(syscall.Conn).SyscallConn()
	if err != nil {
		return nc
	}
	s := &sock{Conn: nc, raw: raw}
	s.in.f, s.out.f, s.gf, s.af, s.lf = s.read, s.write, s.readLent, s.ask1, s.look1
	return s
}

func (s *sock) read(fd uintptr) bool {
	c := &s.in
	for {
		n, _, e := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(c.p))), uintptr(len(c.p)))
		switch e {
		case 0:
			c.n = int(n)
			return true
		case syscall.EAGAIN:
			return false
		case syscall.EINTR:
		default:
			c.err = e
			return true
		}
	}
}

// leave takes the connection away from Go's poller, which would be woken by each piece that somebody else reads: it goes on
// under a descriptor of its own, until comeBack. Only Close works meanwhile.
func (s *sock) leave() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left {
		return nil
	}
	var (
		n uintptr
		e syscall.Errno
	)
	if err := s.raw.Control(func(fd uintptr) {
		n, _, e = syscall.RawSyscall(syscall.SYS_FCNTL, fd, syscall.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return err
	}
	if e != 0 {
		return e
	}
	s.left, s.own = true, int(n)
	_ = s.Conn.Close()
	s.Conn, s.raw = goneConn, goneRaw{} // what Go has of a connection takes 400 bytes
	return nil
}

// goneConn and goneRaw stand for a connection that has left; all they say is that it is closed.
var goneConn = new(net.TCPConn)

type goneRaw struct{}

func (goneRaw) Control(func(uintptr)) error    { return net.ErrClosed }
func (goneRaw) Read(func(uintptr) bool) error  { return net.ErrClosed }
func (goneRaw) Write(func(uintptr) bool) error { return net.ErrClosed }

// comeBack undoes leave, on a connection that is to be used again.
func comeBack(nc net.Conn) error {
	if s, ok := nc.(*sock); ok {
		return s.comeBack()
	}
	return nil
}

func (s *sock) comeBack() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.left {
		return nil
	}
	s.left = false
	if s.shut {
		_ = syscall.Close(s.own)
		return net.ErrClosed
	}
	f := os.NewFile(uintptr(s.own), "")
	nc, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		return err
	}
	if t, ok := nc.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(keepAlive) // Go has set its own
	}
	s.Conn = nc
	s.raw, err = nc.(syscall.Conn).SyscallConn()
	return err
}

// begin and done frame the time in which the set reads. False: the connection is closed.
func (s *sock) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = s.left && !s.shut
	return s.away
}

func (s *sock) done() {
	s.mu.Lock()
	s.away = false
	s.mu.Unlock()
}

// Close implements net.Conn.
func (s *sock) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.left:
		return s.Conn.Close()
	case s.away:
		s.shut = true
		return syscall.Shutdown(s.own, syscall.SHUT_RD) // the set sees an end, and who waits for it closes
	}
	s.left, s.shut = false, true
	return syscall.Close(s.own)
}

// writeNow writes what can be written without a wait, and so without looking at the deadline.
func (s *sock) writeNow(p []byte) (int, error) {
	if s.of == nil {
		s.of = func(fd uintptr) { s.write(fd) }
	}
	c := &s.out
	c.p, c.n, c.err = p, 0, nil
	err := s.raw.Control(s.of)
	c.p = nil
	return c.n, s.writeError(err)
}

func (s *sock) writeError(err error) error {
	if err == nil && s.out.err != nil {
		err = &net.OpError{Op: "write", Net: s.RemoteAddr().Network(), Err: os.NewSyscallError("write", s.out.err)}
	}
	return err
}

// Read implements net.Conn.
func (s *sock) Read(p []byte) (int, error) {
	if len(p) == 0 || len(p) > shortCall {
		return s.Conn.Read(p)
	}
	c := &s.in
	c.p, c.n, c.err = p, 0, nil
	err := s.raw.Read(c.f)
	c.p = nil
	switch {
	case err != nil:
		return 0, err
	case c.err != nil:
		return 0, &net.OpError{Op: "read", Net: s.RemoteAddr().Network(), Err: os.NewSyscallError("read", c.err)}
	case c.n == 0:
		return 0, io.EOF
	}
	return c.n, nil
}

func (s *sock) write(fd uintptr) bool {
	c := &s.out
	for c.n < len(c.p) {
		n, _, e := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(&c.p[c.n])), uintptr(len(c.p)-c.n))
		switch e {
		case 0:
			c.n += int(n)
		case syscall.EAGAIN:
			return false
		case syscall.EINTR:
		default:
			c.err = e
			return true
		}
	}
	return true
}

// Write implements net.Conn.
func (s *sock) Write(p []byte) (int, error) {
	if len(p) > shortCall {
		return s.Conn.Write(p)
	}
	c := &s.out
	c.p, c.n, c.err = p, 0, nil
	err := s.raw.Write(c.f)
	c.p = nil
	return c.n, s.writeError(err)
}

// ask sends p and waits until there is something to read. The wait begins before the write, so that the answer cannot come
// unseen, and no read has to find out that it is not there yet. fresh false, for a connection that was used before: it has
// ended, or something waits on it that nobody asked for; then nothing was sent.
func (s *sock) ask(p []byte, used bool) (fresh bool, err error) {
	c := &s.out
	c.p, c.n, c.err = p, 0, nil
	s.asked, s.used, s.seen = false, used, waitNothing
	err = s.raw.Read(s.af)
	n := c.n
	c.p = nil
	switch {
	case s.seen != waitNothing:
		return false, nil
	case err == nil && c.err != nil:
		err = &net.OpError{Op: "write", Net: s.RemoteAddr().Network(), Err: os.NewSyscallError("write", c.err)}
	case err == nil && n < len(p):
		_, err = s.Write(p[n:]) // more than the kernel takes at once
	}
	return true, err
}

func (s *sock) ask1(fd uintptr) bool {
	if s.asked {
		return true
	}
	s.asked = true
	if s.used {
		if s.look1(fd); s.seen != waitNothing {
			return true
		}
	}
	return !s.write(fd) || s.out.err != nil
}

// look tells what waits on the connection, without taking it.
func (s *sock) look() waiting {
	if s.raw.Control(s.lf) != nil {
		return waitClosed
	}
	return s.seen
}

func (s *sock) look1(fd uintptr) {
	var b [1]byte
	n, _, e := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	switch {
	case e == syscall.EAGAIN || e == syscall.EINTR:
		s.seen = waitNothing
	case e != 0 || n == 0:
		s.seen = waitClosed
	default:
		s.seen = waitData
	}
}

// lend waits for data and reads it into memory from pool, at most most bytes (-1 = what fits).
func (s *sock) lend(pool *sync.Pool, most int) (p *[]byte, n int, err error) {
	s.pool, s.in.n, s.in.err = pool, most, nil
	err = s.raw.Read(s.gf)
	p, s.gp, s.in.p = s.gp, nil, nil
	switch {
	case err != nil:
		return p, 0, err
	case s.in.err != nil:
		return p, 0, &net.OpError{Op: "read", Net: s.RemoteAddr().Network(), Err: os.NewSyscallError("read", s.in.err)}
	case s.in.n == 0:
		return p, 0, io.EOF
	}
	return p, s.in.n, nil
}

func (s *sock) readLent(fd uintptr) bool {
	most := s.in.n
	s.gp = s.pool.Get().(*[]byte)
	s.in.p = *s.gp
	if most >= 0 && most < len(s.in.p) {
		s.in.p = s.in.p[:most]
	}
	if s.read(fd) {
		if s.in.err != nil {
			s.in.n = 0
		}
		return true
	}
	s.pool.Put(s.gp)
	s.gp, s.in.p, s.in.n = nil, nil, most
	return false
}

// SyscallConn implements syscall.Conn.
func (s *sock) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

// CloseWrite ends our side.
func (s *sock) CloseWrite() error { return s.Conn.(interface{ CloseWrite() error }).CloseWrite() }

func isSock(nc net.Conn) bool { _, ok := nc.(*sock); return ok }

// plainConn is the connection that net.Buffers knows how to write to at once.
func plainConn(nc net.Conn) net.Conn {
	if s, ok := nc.(*sock); ok {
		return s.Conn
	}
	return nc
}
