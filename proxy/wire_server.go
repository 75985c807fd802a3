package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Server serves one listener's HTTP/1.1 on connections of its own. What is not for that path it hands to net/http:
// HTTP/2, recognised by its preface or by ALPN, and the paths that do not belong to the core. Both end in the same
// core, so that choice, limits, retry and accounting are the same.
type Server struct {
	p      *Proxy
	role   role
	std    *http.Server
	prefix string // of targets for std; "" = none

	budget budget

	hand *handoff

	mu      sync.Mutex
	ln      net.Listener
	conns   map[*wireServerConn]struct{}
	closing atomic.Bool // no new connections, and those that are there end one after another
	closed  bool        // all are closed
	wg      sync.WaitGroup
	stdRun  sync.WaitGroup // std's Serve
	unwatch sync.Once      // the connections
}

// lastWord is how long after its beginning or its last answer a connection may still bring a request when the server shuts
// down. Who connects is about to ask, and who was told that the connection stays open may ask again at once: both
// would see a reset. An older silent connection is closed at once.
const lastWord = time.Second

// ClientServer returns the server of the clients' listener. std serves HTTP/2; its handler should be ClientHandler.
func (p *Proxy) ClientServer(std *http.Server) *Server {
	s := &Server{p: p, role: roleEntry, std: std, conns: make(map[*wireServerConn]struct{})}
	s.budget.max = p.cfg.MaxConns
	std.ConnState = s.countHanded
	return s
}

// PeerServer returns the server of the other agents' listener. std serves HTTP/2 and all targets that begin with
// prefix.
func (p *Proxy) PeerServer(std *http.Server, prefix string) *Server {
	std.ConnContext = p.provenContext
	return &Server{p: p, role: roleTarget, std: std, prefix: prefix, conns: make(map[*wireServerConn]struct{})}
}

// Serve accepts connections, TLS ones too, until Shutdown or Close; then it returns http.ErrServerClosed.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	if s.closing.Load() {
		s.mu.Unlock()
		return http.ErrServerClosed
	}
	s.ln, s.hand = l, newHandoff(l.Addr())
	s.stdRun.Go(func() { _ = s.std.Serve(s.hand) }) // ends with the hand-off
	s.wg.Add(1)
	s.mu.Unlock()
	defer s.wg.Done()
	s.p.ends.open()
	var pause time.Duration
	for {
		nc, err := l.Accept()
		if err != nil {
			if s.closing.Load() {
				return http.ErrServerClosed
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// Out of descriptors, or a connection that ended while it waited: nothing is gained by spinning.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			time.Sleep(pause)
			continue
		}
		pause = 0
		if !s.makeRoom() {
			_ = nc.Close()
			continue
		}
		c := &wireServerConn{s: s, nc: fastConn(nc)}
		c.since.Store(time.Now().UnixNano())
		if !s.track(c) {
			_ = nc.Close()
			return http.ErrServerClosed
		}
		s.wg.Go(c.serve)
	}
}

// track takes a connection in, also one that was accepted just before the listener closed.
func (s *Server) track(c *wireServerConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) untrack(c *wireServerConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// Shutdown stops accepting, closes connections that have been silent for a second, and waits for exchanges under way, or for
// ctx's end. Who serves a real listener should call [LastAccepts] before.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stop(false)
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	// A connection that has said nothing yet may turn out to be HTTP/2, so net/http goes on for as long as one may be silent.
	young := time.NewTimer(lastWord)
	defer young.Stop()
	select {
	case <-done:
	case <-young.C:
	case <-ctx.Done():
	}
	err := s.std.Shutdown(ctx)
	select {
	case <-done:
		s.end()
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends everything at once.
func (s *Server) Close() error {
	s.stop(true)
	err := s.std.Close()
	s.wg.Wait()
	s.end()
	return err
}

func (s *Server) stop(all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing.Store(true)
	s.closed = s.closed || all
	if s.ln != nil {
		_ = s.ln.Close()
	}
	if all && s.hand != nil {
		_ = s.hand.Close()
	}
	for c := range s.conns {
		if all {
			_ = underTLS(c.nc).Close()
		} else {
			c.hurry()
		}
	}
}

// end frees what connections needed, when there are none any more.
func (s *Server) end() {
	s.mu.Lock()
	hand := s.hand
	s.mu.Unlock()
	if hand != nil { // it has served
		_ = hand.Close()
		s.unwatch.Do(s.p.ends.shut)
	}
	s.stdRun.Wait()
}

// handOff gives a connection to net/http, with what was read of it.
func (s *Server) handOff(nc net.Conn, early []byte) {
	nc = plainConn(nc)
	if len(early) > 0 {
		nc = &earlyConn{Conn: nc, early: append([]byte(nil), early...)}
	}
	if !s.hand.give(nc) {
		_ = nc.Close()
	}
}

// forStd reports whether a target is not the core's.
func (s *Server) forStd(target []byte) bool {
	return s.prefix != "" && strings.HasPrefix(unsafeString(target), s.prefix)
}

// handoff is the listener from which net/http gets its connections.
type handoff struct {
	addr net.Addr
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func newHandoff(a net.Addr) *handoff {
	return &handoff{addr: a, ch: make(chan net.Conn), done: make(chan struct{})}
}

func (h *handoff) give(nc net.Conn) bool {
	select {
	case h.ch <- nc:
		return true
	case <-h.done:
		return false
	}
}

// Accept implements net.Listener.
func (h *handoff) Accept() (net.Conn, error) {
	select {
	case nc := <-h.ch:
		return nc, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *handoff) Close() error { h.once.Do(func() { close(h.done) }); return nil }

// Addr implements net.Listener.
func (h *handoff) Addr() net.Addr { return h.addr }

// earlyConn gives bytes that were read ahead first.
type earlyConn struct {
	net.Conn
	early []byte
}

func (c *earlyConn) Read(p []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(p, c.early)
		c.early = c.early[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// CloseWrite passes a half close on.
func (c *earlyConn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return nil
}

// handshake completes TLS and reports whether HTTP/2 was agreed on.
func handshake(nc net.Conn) (h2 bool, err error) {
	t, ok := nc.(*tls.Conn)
	if !ok {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), headTimeout)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		return false, err
	}
	return t.ConnectionState().NegotiatedProtocol == "h2", nil
}
