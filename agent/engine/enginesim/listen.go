package enginesim

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Serve serves on l until ctx ends, then closes every connection and returns nil. A fault "refuse" can only close what it
// accepts, for l is the caller's: use ListenAndServe for connections that are really refused.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	hs := s.httpServer()
	stop := context.AfterFunc(ctx, func() { _ = hs.Close() })
	defer stop()
	err := hs.Serve(&listener{l, &s.conns, true})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// ListenAndServe listens on an address ("tcp", "127.0.0.1:0" or "unix", "/path"), calls ready with what it got, and serves
// until ctx ends. While the engine is dead or refuses, nobody listens there.
func (s *Server) ListenAndServe(ctx context.Context, network, address string, ready func(net.Addr)) error {
	hs := s.httpServer()
	stop := context.AfterFunc(ctx, func() { _ = hs.Close() })
	defer stop()
	for ctx.Err() == nil {
		l, err := s.listen(ctx, network, address)
		if err != nil {
			return err
		}
		if network == "tcp" {
			address = l.Addr().String() // the same port the next time
		}
		if ready != nil {
			ready(l.Addr())
			ready = nil
		}
		changed, refusing := s.conns.watch()
		served, broken := make(chan struct{}), error(nil)
		go func() {
			broken = hs.Serve(&listener{l, &s.conns, false})
			close(served)
		}()
		for !refusing && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-changed:
				changed, refusing = s.conns.watch()
			case <-served:
				if ctx.Err() == nil {
					return broken
				}
				return nil
			}
		}
		_ = l.Close()
		<-served
		for refusing && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-changed:
				changed, refusing = s.conns.watch()
			}
		}
	}
	return nil
}

// listen listens, and tries again for a second if the address is in use: the old listener may just be closing.
func (s *Server) listen(ctx context.Context, network, address string) (net.Listener, error) {
	open := s.cfg.Listen
	if open == nil {
		open = new(net.ListenConfig).Listen
	}
	for try := 0; ; try++ {
		if network == "unix" {
			_ = os.Remove(address) // left by a killed process
		}
		l, err := open(ctx, network, address)
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) || try == 20 {
			return l, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *Server) httpServer() *http.Server {
	return &http.Server{
		Handler: s, IdleTimeout: s.cfg.KeepAlive, ErrorLog: log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState: func(c net.Conn, st http.ConnState) {
			if c, ok := c.(*conn); ok {
				c.idle.Store(st == http.StateIdle || st == http.StateNew)
			}
		},
	}
}

type connKey struct{}

// conns are the connections open, and whether new ones are welcome.
type conns struct {
	mu       sync.Mutex
	next     uint64
	open     map[*conn]struct{}
	refusing bool
	changed  chan struct{}
}

func (cs *conns) len() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.open)
}

// refuse sets whether connections are refused, and closes the idle ones if so.
func (cs *conns) refuse(v bool) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.refusing == v {
		return
	}
	cs.refusing = v
	if cs.changed != nil {
		close(cs.changed)
		cs.changed = nil
	}
	if v {
		for c := range cs.open {
			if c.idle.Load() {
				delete(cs.open, c)
				_ = c.Conn.Close()
			}
		}
	}
}

func (cs *conns) watch() (<-chan struct{}, bool) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.changed == nil {
		cs.changed = make(chan struct{})
	}
	return cs.changed, cs.refusing
}

func (cs *conns) resetAll() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for c := range cs.open {
		delete(cs.open, c)
		c.linger()
		_ = c.Conn.Close()
	}
}

func (cs *conns) add(c net.Conn) *conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.open == nil {
		cs.open = map[*conn]struct{}{}
	}
	cs.next++
	k := &conn{Conn: c, id: cs.next, set: cs}
	cs.open[k] = struct{}{}
	return k
}

// listener numbers the connections. shut says that it goes on accepting while connections are refused, to break them.
type listener struct {
	net.Listener
	set  *conns
	shut bool
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		k := l.set.add(c)
		if _, refusing := l.set.watch(); refusing && l.shut {
			k.reset()
			continue
		}
		return k, nil
	}
}

// conn is a connection that knows its number, and how its client left.
type conn struct {
	net.Conn
	id     uint64
	set    *conns
	idle   atomic.Bool
	broken atomic.Bool // the client reset it
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, syscall.ECONNRESET) {
		c.broken.Store(true)
	}
	return n, err
}

func (c *conn) Close() error {
	c.set.mu.Lock()
	delete(c.set.open, c)
	c.set.mu.Unlock()
	return c.Conn.Close()
}

// reset closes with a TCP reset, where there is TCP.
func (c *conn) reset() {
	c.linger()
	_ = c.Close()
}

// linger makes the next close a reset.
func (c *conn) linger() {
	if t, ok := c.Conn.(interface{ SetLinger(sec int) error }); ok { // TCP
		_ = t.SetLinger(0)
	}
}

func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

func connID(ctx context.Context) uint64 {
	if c := connOf(ctx); c != nil {
		return c.id
	}
	return 0
}

// wasReset reports whether the client ended the connection with a reset, not a plain close.
func wasReset(ctx context.Context) bool {
	c := connOf(ctx)
	return c != nil && c.broken.Load()
}

func resetConn(ctx context.Context) {
	if c := connOf(ctx); c != nil {
		c.reset()
	}
}
