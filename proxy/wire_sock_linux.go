package proxy

import (
	"crypto/tls"
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

	brief bool   // Write does not wait, and keeps what would have to
	rest  []byte // what it kept

	vf  func(fd uintptr) bool // of writeVec
	vec net.Buffers

	mu   sync.Mutex
	left bool // it goes on under a descriptor that Go's poller does not know, see hangups.take
	away bool // the set reads or writes it
	shut bool // Close has come meanwhile
	own  int  // the descriptor, while left or away

	ends bool // the other side may have ended behind what can be read
	dry  bool // all that can be read has been
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
// under a descriptor of its own, until comeBack. Reads and writes do not wait meanwhile, and there are no deadlines.
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
	s.Conn, s.raw = goneConn, (*ownRaw)(s) // what Go has of a connection takes 400 bytes
	return nil
}

// goneConn stands for a connection that has left; all it says is that it is closed.
var goneConn = new(net.TCPConn)

// ownRaw is the raw side of a connection that has left. Those that read it are told by errLater that they would have to wait, so
// that TLS, to which such an error is a passing one, can be read by the set too.
type ownRaw sock

func (r *ownRaw) call(f func(uintptr) bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.left:
		return net.ErrClosed
	case !f(uintptr(r.own)):
		return errLater
	}
	return nil
}

// Control implements syscall.RawConn.
func (r *ownRaw) Control(f func(uintptr)) error {
	return r.call(func(fd uintptr) bool { f(fd); return true })
}

// Read implements syscall.RawConn. A read that did not fill its buffer has emptied the socket.
func (r *ownRaw) Read(f func(uintptr) bool) error {
	if r.dry {
		return errLater
	}
	err := r.call(f)
	r.dry = err == nil && r.in.n < len(r.in.p) && !r.ends
	return err
}

// Write implements syscall.RawConn.
func (r *ownRaw) Write(f func(uintptr) bool) error { return r.call(f) }

// errLater is the error of a read or write that would have to wait.
var errLater net.Error = laterError{}

type laterError struct{}

func (laterError) Error() string   { return "it would have to wait" }
func (laterError) Timeout() bool   { return true }
func (laterError) Temporary() bool { return true }

// comeBack undoes leave, on a connection that is to be used again.
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

// begin and done frame the time in which the set reads or writes under the descriptor own: meanwhile nobody closes it. False: the
// connection is closed.
func (s *sock) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = !s.shut && (s.left || s.raw.Control(func(fd uintptr) { s.own = int(fd) }) == nil)
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
	case s.away:
		s.shut = true
		return syscall.Shutdown(s.own, syscall.SHUT_RDWR) // the set sees an end, and who waits for it closes
	case !s.left:
		return s.Conn.Close()
	}
	s.left, s.shut = false, true
	return syscall.Close(s.own)
}

// writeNow writes p, through t unless that is nil, as far as it goes without a wait, and so without looking at the deadline, on a
// connection that is away. False: drain must write the rest.
func (s *sock) writeNow(t *tls.Conn, p []byte) (whole bool, err error) {
	if t == nil {
		err = s.writeBrief(p)
	} else {
		s.brief = true
		_, err = t.Write(p)
		s.brief = false
	}
	return s.rest == nil, err
}

// drain writes what writeNow could not.
func (s *sock) drain() error {
	p := s.rest
	s.rest = nil
	_, err := s.Write(p)
	return err
}

func (s *sock) writeBrief(p []byte) error {
	if s.rest != nil {
		s.rest = append(s.rest, p...)
		return nil
	}
	for {
		n, _, e := syscall.RawSyscall6(syscall.SYS_SENDTO, uintptr(s.own), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			syscall.MSG_NOSIGNAL, 0, 0) // cheaper than write, which is for files too
		switch {
		case e == 0 && int(n) == len(p):
			return nil
		case e == 0:
			s.rest = append([]byte(nil), p[n:]...)
			return nil
		case e == syscall.EAGAIN:
			s.rest = append([]byte(nil), p...)
			return nil
		case e != syscall.EINTR:
			return &net.OpError{Op: "write", Err: os.NewSyscallError("sendto", e)}
		}
	}
}

// failed is the error of a call: its own, or err.
func (s *sock) failed(op string, c *call, err error) error {
	if err != nil || c.err == nil {
		return err
	}
	e := &net.OpError{Op: op, Err: os.NewSyscallError(op, c.err)}
	if a := s.RemoteAddr(); a != nil { // it has not left
		e.Net = a.Network()
	}
	return e
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
	switch err = s.failed("read", c, err); {
	case err != nil:
		return 0, err
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
	switch {
	case s.brief:
		return len(p), s.writeBrief(p)
	case len(p) > shortCall:
		return s.Conn.Write(p)
	}
	c := &s.out
	c.p, c.n, c.err = p, 0, nil
	err := s.raw.Write(c.f)
	c.p = nil
	return c.n, s.failed("write", c, err)
}

// vecPieces is how many pieces go with one call. A body's are as large as shortCall.
const vecPieces = 4

// writeVec writes pieces.
func (s *sock) writeVec(vec net.Buffers) error {
	if s.vf == nil {
		s.vf = s.writePieces
	}
	s.vec, s.out.err = vec, nil
	err := s.raw.Write(s.vf)
	s.vec = nil
	return s.failed("write", &s.out, err)
}

// writePieces is false where the socket takes no more at once.
func (s *sock) writePieces(fd uintptr) bool {
	for len(s.vec) > 0 {
		var iov [vecPieces]syscall.Iovec
		n := 0
		for ; n < min(len(s.vec), vecPieces); n++ {
			iov[n].Base = unsafe.SliceData(s.vec[n])
			iov[n].SetLen(len(s.vec[n]))
		}
		k, _, e := syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&iov)), uintptr(n))
		switch e {
		case 0:
			s.vec = behind(s.vec, int(k))
		case syscall.EAGAIN:
			return false
		case syscall.EINTR:
		default:
			s.out.err = e
			return true
		}
	}
	return true
}

// behind is what is left of the pieces after their first n bytes.
func behind(vec net.Buffers, n int) net.Buffers {
	for len(vec) > 0 && n >= len(vec[0]) {
		n -= len(vec[0])
		vec = vec[1:]
	}
	if n > 0 {
		vec[0] = vec[0][n:]
	}
	return vec
}

// ask sends pieces and waits until there is something to read. The wait begins before the write, so that the answer cannot come
// unseen, and no read has to find out that it is not there yet. There is no wait if the socket does not take all of them at once; it
// returns what is left. fresh false, for a connection that was used before: it has ended, or something waits on it that nobody
// asked for; then nothing was sent.
func (s *sock) ask(vec net.Buffers, used bool) (left net.Buffers, fresh bool, err error) {
	s.vec, s.out.err = vec, nil
	s.asked, s.used, s.seen = false, used, waitNothing
	err = s.raw.Read(s.af)
	left, s.vec = s.vec, nil
	return left, s.seen == waitNothing, s.failed("write", &s.out, err)
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
	return !s.writePieces(fd) || s.out.err != nil
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
	switch err = s.failed("read", &s.in, err); {
	case err != nil:
		return p, 0, err
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

// sockOf is the connection of ours under nc, nil if there is none.
func sockOf(nc net.Conn) *sock { s, _ := below(nc).(*sock); return s }

// plainConn is the connection that net.Buffers knows how to write to at once.
func plainConn(nc net.Conn) net.Conn {
	if s, ok := nc.(*sock); ok {
		return s.Conn
	}
	return nc
}
