package faultsim

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// window is how many bytes a connection takes before its writer must wait for the reader.
const window = 64 << 10

// conn is one end of a connection in memory. The network's lock guards it.
type conn struct {
	n             *network
	local, remote string
	peer          *conn
	moved         *sync.Cond // somebody at this end may go on

	in      []piece // what the other end has sent
	size    int
	arrival time.Time // of the newest piece
	fin     bool      // the other end has ended its side, behind in
	finAt   time.Time
	err     error // broken
	lost    bool  // nothing arrives
	closed  bool
	hard    bool // a close is a reset

	read, write deadline
}

// piece is something written, readable from at on.
type piece struct {
	b  []byte
	at time.Time
}

type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

func (c *conn) touches(host string) bool { return hostOf(c.local) == host || hostOf(c.remote) == host }
func (c *conn) between(a, b string) bool {
	return pair(hostOf(c.local), hostOf(c.remote)) == pair(a, b)
}

// reachable reports whether bytes get from one end to the other now.
func (c *conn) reachable() bool {
	a, b := hostOf(c.local), hostOf(c.remote)
	return !c.lost && c.n.cut[pair(a, b)] == 0 && c.n.stalled[a] <= 0 && c.n.stalled[b] <= 0
}

// breakOff breaks both ends at once.
func (c *conn) breakOff(err error) {
	for _, x := range []*conn{c, c.peer} {
		if x.err == nil {
			x.err, x.in, x.size = err, nil, 0
		}
	}
	c.wake()
	delete(c.n.conns, c)
	delete(c.n.conns, c.peer)
}

// wake makes both ends look again.
func (c *conn) wake() {
	c.moved.Broadcast()
	c.peer.moved.Broadcast()
}

// later wakes this end after d.
func (c *conn) later(d time.Duration) *time.Timer {
	return time.AfterFunc(d, func() {
		c.n.mu.Lock()
		defer c.n.mu.Unlock()
		c.moved.Broadcast()
	})
}

// doom breaks a connection after the keep-alive time, unless bytes flow again by then.
func (c *conn) doom() {
	time.AfterFunc(keepalive, func() {
		c.n.mu.Lock()
		defer c.n.mu.Unlock()
		if c.err == nil && (c.lost || c.n.cut[pair(hostOf(c.local), hostOf(c.remote))] > 0) {
			c.breakOff(syscall.ETIMEDOUT)
		}
	})
}

// forget takes a connection off the list once both ends are closed.
func (c *conn) forget() {
	if c.closed && c.peer.closed {
		delete(c.n.conns, c)
		delete(c.n.conns, c.peer)
	}
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		now := time.Now()
		switch {
		case c.closed:
			return 0, opError("read", net.ErrClosed)
		case c.read.passed():
			return 0, opError("read", os.ErrDeadlineExceeded)
		case c.err != nil:
			return 0, opError("read", os.NewSyscallError("read", c.err))
		case len(b) == 0:
			return 0, nil
		case !c.reachable():
		case len(c.in) > 0 && !c.in[0].at.After(now):
			m := copy(b, c.in[0].b)
			if c.in[0].b = c.in[0].b[m:]; len(c.in[0].b) == 0 {
				c.in = c.in[1:]
			}
			if c.size -= m; c.size+m >= window {
				c.peer.moved.Broadcast()
			}
			return m, nil
		case len(c.in) > 0:
			c.later(c.in[0].at.Sub(now))
		case c.fin && !c.finAt.After(now):
			return 0, io.EOF
		case c.fin:
			c.later(c.finAt.Sub(now))
		}
		c.moved.Wait()
	}
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	done := 0
	for {
		switch {
		case c.closed:
			return done, opError("write", net.ErrClosed)
		case c.write.passed():
			return done, opError("write", os.ErrDeadlineExceeded)
		case c.err != nil:
			return done, opError("write", os.NewSyscallError("write", c.err))
		case c.peer.closed && c.reachable():
			return done, opError("write", os.NewSyscallError("write", syscall.EPIPE))
		case len(b) == 0:
			return done, nil
		case c.peer.size < window:
			m := min(len(b), window-c.peer.size)
			c.peer.put(b[:m])
			b, done = b[m:], done+m
			c.peer.moved.Broadcast()
			if len(b) == 0 {
				return done, nil
			}
			continue
		}
		c.moved.Wait()
	}
}

// put delivers bytes after the way's delay, in order.
func (c *conn) put(b []byte) {
	c.in = append(c.in, piece{append([]byte(nil), b...), c.due()})
	c.size += len(b)
}

func (c *conn) due() time.Time {
	at := time.Now().Add(c.n.slow[pair(hostOf(c.local), hostOf(c.remote))])
	if at.Before(c.arrival) {
		at = c.arrival
	}
	c.arrival = at
	return at
}

// Close implements net.Conn. The other end reads what is there and then the end, or an error if this was a reset.
func (c *conn) Close() error {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.closed {
		return opError("close", net.ErrClosed)
	}
	c.closed = true
	c.read.stop()
	c.write.stop()
	p := c.peer
	switch {
	case p.err != nil || p.closed:
	case (c.hard || len(c.in) > 0) && c.reachable():
		p.err, p.in = syscall.ECONNRESET, nil
	case !p.fin:
		p.fin, p.finAt = true, p.due()
	}
	c.forget()
	c.wake()
	return nil
}

// CloseWrite ends our side.
func (c *conn) CloseWrite() error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if p := c.peer; !c.closed && !p.fin {
		p.fin, p.finAt = true, p.due()
		c.wake()
	}
	return nil
}

// SetLinger with 0 makes Close a reset, as for TCP.
func (c *conn) SetLinger(sec int) error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.hard = sec == 0
	return nil
}

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
	}
}

// set arms a deadline; the network is locked.
func (d *deadline) set(c *conn, t time.Time) {
	d.stop()
	if d.at = t; t.IsZero() {
		return
	}
	if left := time.Until(t); left > 0 {
		d.timer = c.later(left)
		return
	}
	c.moved.Broadcast()
}

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.read.set(c, t)
	c.write.set(c, t)
	return nil
}

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.read.set(c, t)
	return nil
}

// SetWriteDeadline implements net.Conn.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.write.set(c, t)
	return nil
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return tcpAddr(c.local) }

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return tcpAddr(c.remote) }
