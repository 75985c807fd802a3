package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// memNet is a network of in-memory listeners for synctest bubbles.
type memNet struct {
	mu sync.Mutex
	m  map[string]*memListener
}

type memListener struct {
	net   *memNet
	addr  string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (n *memNet) listen(addr string) *memListener {
	l := &memListener{net: n, addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.m == nil {
		n.m = make(map[string]*memListener)
	}
	n.m[addr] = l
	return l
}

func (n *memNet) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.m[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	}
	a, b := net.Pipe()
	select {
	case l.conns <- b:
		return a, nil
	case <-l.done:
	case <-ctx.Done():
	}
	return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.net.mu.Lock()
		delete(l.net.m, l.addr)
		l.net.mu.Unlock()
	})
	return nil
}

func (l *memListener) Addr() net.Addr { return memAddr(l.addr) }

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

// inOrder is a policy that picks the first replica of its list that was not tried.
type inOrder []uint64

func (inOrder) Name() string { return "in_order" }

func (o inOrder) Pick(s *routing.Snapshot, r *routing.Request, _ time.Time, _ *rand.Rand) routing.Decision {
	for _, b := range o {
		if slices.Contains(r.Tried, b) {
			continue
		}
		for _, p := range s.Peers() {
			if p.Boot() == b {
				return routing.Decision{Peer: p, Tokens: r.PromptTokens, Score: 0.1, Reason: routing.ReasonBest}
			}
		}
	}
	if len(r.Tried) > 0 {
		return routing.Decision{Reason: routing.ReasonAllTried}
	}
	return routing.Decision{Reason: routing.ReasonNoneUsable}
}

// fleet is some replicas, each an engine handler with its agent, on one network. Boot ids are 1, 2, 3.
type fleet struct {
	t       *testing.T
	net     *memNet
	agents  []*Proxy
	clients []string // addresses
	engines []*http.Server
	servers []server
	conns   []*connSet
	hc      *http.Client
	tune    func(i int, c *Config)
}

// server is a front of an agent: our own, or net/http's.
type server interface {
	Serve(net.Listener) error
	Close() error
}

// std runs the package's tests on net/http, both ways: go test ./proxy -std. The same must hold there.
var std = flag.Bool("std", false, "agents speak by net/http instead of the package's own HTTP/1.1")

// connSet knows an engine's connections, so that a test can kill the engine.
type connSet struct {
	mu   sync.Mutex
	m    map[net.Conn]bool
	seen int
}

func (s *connSet) state(c net.Conn, st http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch st {
	case http.StateNew:
		s.m[c] = true
		s.seen++
	case http.StateClosed, http.StateHijacked:
		delete(s.m, c)
	}
}

// newFleet starts the replicas; order is what the first agent's policy picks, by boot id.
func newFleet(t *testing.T, order []uint64, tune func(i int, c *Config), engines ...http.Handler) *fleet {
	t.Helper()
	f := &fleet{t: t, net: &memNet{}, tune: tune}
	now := time.Now()
	for i, h := range engines {
		addr := fmt.Sprintf("engine%d:80", i+1)
		cs := &connSet{m: make(map[net.Conn]bool)}
		var ps http.Protocols
		ps.SetHTTP1(true)
		ps.SetUnencryptedHTTP2(true)
		srv := &http.Server{Handler: h, ConnState: cs.state, Protocols: &ps}
		if s, ok := h.(*scripted); ok {
			srv.IdleTimeout = s.idle
		}
		f.serve(srv, f.net.listen(addr))
		f.engines, f.conns = append(f.engines, srv), append(f.conns, cs)
	}
	for i := range engines {
		boot := uint64(i + 1)
		tab := routing.NewTable(routing.Member{Boot: boot, Node: fmt.Sprintf("n%d", boot), Addr: peerAddr(i)})
		for j := range engines {
			tab.SetMember(routing.Member{Boot: uint64(j + 1), Node: fmt.Sprintf("n%d", j+1), Addr: peerAddr(j)}, now)
		}
		cfg := Config{
			Table: tab, Policy: inOrder(order), Dial: f.net.dial, Seed: 1,
			EngineURL: &url.URL{Scheme: "http", Host: fmt.Sprintf("engine%d:80", boot)},
		}
		cfg.std = *std
		if tune != nil {
			tune(i, &cfg)
		}
		p, err := New(cfg)
		require.NoError(t, err)
		f.agents = append(f.agents, p)
		client, peer := server(NewServer(p.ClientHandler(), nil, nil)), server(NewServer(withLink(p), nil, nil))
		if !*std {
			client, peer = p.ClientServer(client.(*http.Server)), p.PeerServer(peer.(*http.Server), LinkPath)
		}
		f.serve(client, f.net.listen(clientAddr(i)))
		f.serve(peer, f.net.listen(peerAddr(i)))
		f.clients = append(f.clients, clientAddr(i))
	}
	f.hc = f.client(false)
	t.Cleanup(f.stop)
	return f
}

// withLink is what a peer listener serves.
func withLink(p *Proxy) http.Handler {
	requests := p.PeerHandler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == LinkPath {
			p.ServeLink(w, r)
			return
		}
		requests.ServeHTTP(w, r)
	})
}

func peerAddr(i int) string   { return fmt.Sprintf("peer%d:80", i+1) }
func clientAddr(i int) string { return fmt.Sprintf("agent%d:80", i+1) }

func (f *fleet) serve(s server, l net.Listener) {
	f.servers = append(f.servers, s)
	go func() { _ = s.Serve(l) }()
}

// client makes an HTTP client; its connections are not kept.
func (f *fleet) client(h2 bool) *http.Client {
	var ps http.Protocols
	ps.SetHTTP1(!h2)
	ps.SetUnencryptedHTTP2(h2)
	return &http.Client{Transport: &http.Transport{DialContext: f.net.dial, DisableKeepAlives: !h2, DisableCompression: true, Protocols: &ps}}
}

func (f *fleet) stop() {
	f.hc.CloseIdleConnections()
	for _, p := range f.agents {
		p.gate.close()
		p.engine.close()
		p.links.closeAll()
		p.questions.close()
	}
	for _, s := range f.servers {
		_ = s.Close()
	}
}

// metrics waits until all that can end has ended, and returns an agent's counters: an answer is at the client a
// little before its request is off the books.
func (f *fleet) metrics(i int) Metrics {
	synctest.Wait()
	return f.agents[i].Metrics()
}

// idle checks that nothing is counted as under way anywhere.
func (f *fleet) idle() {
	f.t.Helper()
	synctest.Wait()
	settle()
	for i, p := range f.agents {
		l := p.Load()
		require.Zero(f.t, l.Running+l.Waiting+l.PendingTokens, "engine load of agent %d", i+1)
		require.Zero(f.t, p.Inflight(), "in flight at agent %d", i+1)
		require.Zero(f.t, p.gate.count+p.gate.pending+len(p.gate.inside)+p.gate.queue.len()+p.gate.queue.tokens(), "gate of agent %d", i+1)
		require.Zero(f.t, p.bodies.used.Load(), "body memory of agent %d", i+1)
		for _, peer := range p.cfg.Table.Snapshot().Peers() {
			require.Zero(f.t, peer.Inflight(), "agent %d to %d", i+1, peer.Boot())
			require.Zero(f.t, peer.InflightTokens(), "agent %d to %d", i+1, peer.Boot())
		}
	}
}

const chatPath = "/v1/chat/completions"

func chatBody(stream bool) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":"hello there"}]}`, stream)
}

// post sends a chat request to the first agent.
func (f *fleet) post(ctx context.Context, body string, header ...string) (*http.Response, error) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://"+f.clients[0]+chatPath, strings.NewReader(body))
	require.NoError(f.t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return f.hc.Do(req)
}

// get posts and reads all; err is the body's.
func (f *fleet) get(body string, header ...string) (*http.Response, string, error) {
	f.t.Helper()
	resp, err := f.post(context.Background(), body, header...)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	settle()
	return resp, string(b), err
}

// settle gives the agents a moment for their books: a client has the end of its answer before they are closed.
func settle() { time.Sleep(5 * time.Millisecond) }

// Pieces of a chat stream.
func chunk(content string) string {
	return fmt.Sprintf(`data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`, content) + "\n\n"
}

const (
	roleChunk   = `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	finishChunk = `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	abortChunk  = `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}` + "\n\n"
	doneChunk   = "data: [DONE]\n\n"
)

// eventHead begins an event stream and flushes its head.
func eventHead(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.WriteHeader(200)
	flush(w)
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

func say(w http.ResponseWriter, s string) {
	_, _ = io.WriteString(w, s)
	flush(w)
}

// die ends the engine's connection without an end of the answer.
func die() { panic(http.ErrAbortHandler) }

// scripted is an engine that answers each request by f and counts.
type scripted struct {
	mu     sync.Mutex
	n      int
	open   int
	bodies []string
	heads  []http.Header
	uris   []string
	ended  []time.Time // when a request's context ended before its answer did
	f      func(n int, w http.ResponseWriter, r *http.Request)

	idle time.Duration // after which the engine closes a kept connection; 0 = never
}

func engine(f func(n int, w http.ResponseWriter, r *http.Request)) *scripted { return &scripted{f: f} }

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.n++
	n := s.n
	s.open++
	s.bodies = append(s.bodies, string(b))
	h := r.Header.Clone()
	h.Set("Host", r.Host)
	s.heads = append(s.heads, h)
	s.uris = append(s.uris, r.RequestURI)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
		if r.Context().Err() != nil {
			s.ended = append(s.ended, time.Now())
		}
	}()
	s.f(n, w, r)
}

func (s *scripted) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n
}

func (s *scripted) last() http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heads[len(s.heads)-1]
}

// streams is an engine that streams the given pieces, gap apart.
func streams(gap time.Duration, pieces ...string) *scripted {
	return engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
		eventHead(w)
		for i, p := range pieces {
			if i > 0 {
				time.Sleep(gap)
			}
			say(w, p)
		}
	})
}

// answers is an engine that answers whole.
func answers(status int, body string, header ...string) *scripted {
	return engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})
}

// arrivals reads a body and notes when its pieces came, since start.
func arrivals(r io.Reader, start time.Time) (text string, at []time.Duration, err error) {
	buf := make([]byte, 64<<10)
	var b bytes.Buffer
	for {
		n, err := r.Read(buf)
		if n > 0 {
			b.Write(buf[:n])
			at = append(at, time.Since(start))
		}
		if errors.Is(err, io.EOF) {
			return b.String(), at, nil
		}
		if err != nil {
			return b.String(), at, err
		}
	}
}

// readCase reads a file of testdata.
func readCase(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	return b
}

// raw sends bytes over a plain connection and returns what comes back until the other side is silent or closes.
func raw(t *testing.T, c net.Conn, msg []byte) (*http.Response, string) {
	t.Helper()
	go func() { _, _ = c.Write(msg) }()
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp, string(b)
}
