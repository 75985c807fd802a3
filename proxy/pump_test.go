//go:build linux

package proxy

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// rawEngine is an engine whose every byte the test decides: it takes requests and hands out the connections.
type rawEngine struct {
	l     net.Listener
	conns chan net.Conn
}

func newRawEngine(t *testing.T) *rawEngine {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	e := &rawEngine{l: l, conns: make(chan net.Conn, 1024)}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go e.serve(c)
		}
	}()
	return e
}

func (e *rawEngine) serve(c net.Conn) {
	r := bufio.NewReader(c)
	req, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, req.Body)
	e.conns <- c
}

const rawHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

// framed is one event in a chunk of its own.
func framed(event string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(event), event) }

// pumpFront serves our own HTTP/1.1 in front of the engine at u on a loopback socket.
func pumpFront(t *testing.T, u *url.URL) (p *Proxy, addr string) {
	p, _, addr = pumpServer(t, u)
	return p, addr
}

func pumpServer(t *testing.T, u *url.URL) (p *Proxy, s *Server, addr string) {
	tab := routing.NewTable(routing.Member{Boot: 1, Node: "a", Addr: "127.0.0.1:1"})
	pol, err := routing.NewPolicy("local")
	require.NoError(t, err)
	p, err = New(Config{Table: tab, Policy: pol, EngineURL: u, StreamThread: true})
	require.NoError(t, err)
	tab.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
	tab.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, time.Now())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s = p.ClientServer(NewServer(p.ClientHandler(), nil, nil))
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); p.engine.close() })
	return p, s, l.Addr().String()
}

// pumpPair serves our own HTTP/1.1 in front of a target agent with the engine at u, TLS between the two.
func pumpPair(t *testing.T, u *url.URL) (entry, target *Proxy, ids [2]*peertls.Identity, addr string) {
	procs := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(procs + 2) // each set keeps one for itself
	t.Cleanup(func() { runtime.GOMAXPROCS(procs) })
	ids = twoIdentities(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	member := routing.Member{Boot: 2, Node: "b", Addr: l.Addr().String()}
	target, err = New(Config{Table: routing.NewTable(member), Policy: inOrder{2}, EngineURL: u, StreamThread: true})
	require.NoError(t, err)
	tc := ids[1].ServerConfig(nil, "h2", "http/1.1")
	srv := target.PeerServer(NewServer(target.PeerHandler(), nil, nil), "")
	go func() { _ = srv.Serve(tls.NewListener(ids[1].Listener(FastListener(l)), tc)) }()

	tab := routing.NewTable(routing.Member{Boot: 1, Node: "a"})
	tab.SetMember(member, time.Now())
	entry, err = New(Config{Table: tab, Policy: inOrder{2}, EngineURL: u, PeerTLS: ids[0].Client, StreamThread: true})
	require.NoError(t, err)
	fl, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	front := entry.ClientServer(NewServer(entry.ClientHandler(), nil, nil))
	go func() { _ = front.Serve(fl) }()
	t.Cleanup(func() {
		_, _ = front.Close(), srv.Close()
		entry.links.closeAll()
		target.engine.close()
	})
	return entry, target, ids, fl.Addr().String()
}

// twoIdentities are those of boots 1 and 2 under one key.
func twoIdentities(t *testing.T) (ids [2]*peertls.Identity) {
	for i := range ids {
		var err error
		ids[i], err = peertls.New(uint64(i+1), [][]byte{tlsKey('a')})
		require.NoError(t, err)
	}
	return ids
}

// overEach runs a test with one agent in front of the engine, and with two and TLS between them.
func overEach(t *testing.T, test func(t *testing.T, front func(t *testing.T, u *url.URL) (addr string))) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	t.Run("one", func(t *testing.T) {
		test(t, func(t *testing.T, u *url.URL) string { _, addr := pumpFront(t, u); return addr })
	})
	t.Run("two over TLS", func(t *testing.T) {
		test(t, func(t *testing.T, u *url.URL) string { _, _, _, addr := pumpPair(t, u); return addr })
	})
}

// askStream sends a chat request and returns the connection.
func askStream(t *testing.T, addr string) net.Conn {
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	body := chatBody(true)
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	require.NoError(t, err)
	return c
}

func (e *rawEngine) url() *url.URL { return &url.URL{Scheme: "http", Host: e.l.Addr().String()} }

// An engine whose end comes in the same moment as its last bytes, whole or as a reset, is noticed at once: the read that
// took the bytes is not followed by one that would find the end.
func TestPumpSeesTheEndBehindData(t *testing.T) {
	overEach(t, func(t *testing.T, front func(t *testing.T, u *url.URL) string) {
		e := newRawEngine(t)
		addr := front(t, e.url())
		for _, linger := range []int{-1, 0} {
			for pause := range 3 {
				var wg sync.WaitGroup
				var late, lost atomic.Int32
				for range 50 {
					c := askStream(t, addr)
					wg.Go(func() {
						resp, err := http.ReadResponse(bufio.NewReader(c), nil)
						if err != nil {
							lost.Add(1)
							return
						}
						at := time.Now()
						b, err := io.ReadAll(resp.Body)
						if err == nil || linger < 0 && !bytes.HasPrefix(b, []byte(chunk("a")+chunk("b"))) {
							lost.Add(1) // never taken for whole, and what came before a plain end is there
						}
						if time.Since(at) > 3*time.Second {
							late.Add(1)
						}
					})
					ec := (<-e.conns).(*net.TCPConn)
					wg.Go(func() {
						_, _ = io.WriteString(ec, rawHead+framed(chunk("a")))
						time.Sleep(time.Duration(10*pause) * time.Millisecond)
						_ = ec.SetLinger(linger)
						_, _ = io.WriteString(ec, framed(chunk("b")))
						_ = ec.Close()
					})
				}
				wg.Wait()
				assert.Zero(t, late.Load(), "linger %d pause %d", linger, pause)
				assert.Zero(t, lost.Load(), "linger %d pause %d", linger, pause)
			}
		}
	})
}

// A client that takes nothing stops the engine, costs no memory, and gets every byte in the end.
func TestPumpBackPressure(t *testing.T) {
	overEach(t, func(t *testing.T, front func(t *testing.T, u *url.URL) string) {
		e := newRawEngine(t)
		addr := front(t, e.url())
		c := askStream(t, addr)
		ec := <-e.conns
		defer ec.Close()
		event := chunk(strings.Repeat("word ", 100))
		const events = 40_000 // more than all sockets on the way hold
		var sent atomic.Int64
		go func() {
			_, _ = io.WriteString(ec, rawHead)
			for range events {
				_, _ = io.WriteString(ec, framed(event))
				sent.Add(1)
			}
			_, _ = io.WriteString(ec, framed(finishChunk)+framed(doneChunk)+"0\r\n\r\n")
		}()
		for was := int64(-1); was != sent.Load() || was == 0; time.Sleep(300 * time.Millisecond) {
			was = sent.Load()
		}
		assert.Less(t, sent.Load(), int64(events), "the engine must be held up")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, strings.Repeat(event, events)+finishChunk+doneChunk, string(b), "every byte, in order")
	})
}

// A client that takes nothing and goes away ends its stream, though a write to it is under way.
func TestPumpHangUpWhileBlocked(t *testing.T) {
	overEach(t, func(t *testing.T, front func(t *testing.T, u *url.URL) string) {
		e := newRawEngine(t)
		addr := front(t, e.url())
		c := askStream(t, addr)
		ec := <-e.conns
		defer ec.Close()
		_, _ = io.WriteString(ec, rawHead)
		event := framed(chunk(strings.Repeat("word ", 100)))
		_ = ec.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
		for {
			if _, err := io.WriteString(ec, event); err != nil {
				break
			}
		}
		_ = c.(*net.TCPConn).CloseWrite() // the side that we hear of; it still reads nothing
		at := time.Now()
		_ = ec.SetReadDeadline(at.Add(5 * time.Second))
		_, err := ec.Read(make([]byte, 1))
		require.Error(t, err)
		assert.Less(t, time.Since(at), 200*time.Millisecond)
	})
}

// In the steady state a chunk allocates nothing.
func TestPumpAllocations(t *testing.T) {
	if *std || raceOn {
		t.Skip("our own HTTP/1.1; the race detector empties pools")
	}
	e := newRawEngine(t)
	_, addr := pumpFront(t, e.url())
	c := askStream(t, addr)
	ec := <-e.conns
	defer ec.Close()
	_, _ = io.WriteString(ec, rawHead)
	event := []byte(framed(chunk("word")))
	buf := make([]byte, 64<<10)
	one := func() {
		_, _ = ec.Write(event)
		for n := 0; n == 0 || !bytes.HasSuffix(buf[:n], []byte("\r\n")); {
			m, err := c.Read(buf[n:])
			require.NoError(t, err)
			n += m
		}
	}
	for range 100 {
		one()
	}
	assert.Less(t, testing.AllocsPerRun(2000, one), 0.5)
}

// A stream is read by the set once it is established, over TCP and over a Unix socket, and its connection serves the next request.
func TestPumpLeavesAndComesBack(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	if runtime.GOMAXPROCS(0) < 2 {
		t.Skip("the set keeps a P for itself")
	}
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			addr, u := "127.0.0.1:0", &url.URL{Scheme: "http"}
			if network == "unix" {
				addr = filepath.Join(t.TempDir(), "e")
				u = &url.URL{Scheme: "unix", Path: addr}
			}
			l, err := net.Listen(network, addr)
			require.NoError(t, err)
			defer l.Close()
			if network == "tcp" {
				u.Host = l.Addr().String()
			}
			p, front := pumpFront(t, u)
			asked := make(chan net.Conn)
			go func() { // one connection only
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				for r := bufio.NewReader(c); ; {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					asked <- c
				}
			}()
			for range 3 {
				c := askStream(t, front)
				ec := <-asked
				_, _ = io.WriteString(ec, rawHead)
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				require.NoError(t, err)
				for i := range 10 {
					event := chunk(fmt.Sprint("word ", i))
					_, _ = io.WriteString(ec, framed(event))
					got := make([]byte, len(event))
					_, err = io.ReadFull(resp.Body, got)
					require.NoError(t, err)
				}
				assert.Equal(t, 1, read(p), "the set reads it")
				_, _ = io.WriteString(ec, framed(finishChunk)+framed(doneChunk)+"0\r\n\r\n")
				_, err = io.ReadAll(resp.Body)
				require.NoError(t, err)
				for end := time.Now().Add(5 * time.Second); p.inflight.Load() > 0; time.Sleep(time.Millisecond) {
					require.True(t, time.Now().Before(end)) // the connection is back in the pool
				}
				assert.Zero(t, read(p))
			}
		})
	}
}

// silentStream begins a stream through the agent at addr, which the set reads and which then says nothing more.
func silentStream(t *testing.T, e *rawEngine, addr string) (resp *http.Response, engine net.Conn) {
	c := askStream(t, addr)
	engine = <-e.conns
	_, _ = io.WriteString(engine, rawHead)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	for i := range 3 {
		event := chunk(fmt.Sprint("word ", i))
		_, _ = io.WriteString(engine, framed(event))
		_, err = io.ReadFull(resp.Body, make([]byte, len(event)))
		require.NoError(t, err)
	}
	return resp, engine
}

// A silent stream that the set reads ends with the agent's drain timeout, and its client sees that it is not whole.
func TestPumpIsCut(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	e := newRawEngine(t)
	p, addr := pumpFront(t, e.url())
	resp, ec := silentStream(t, e, addr)
	p.Cut()
	rest, err := io.ReadAll(resp.Body)
	require.Error(t, err)
	assert.NotContains(t, string(rest), "[DONE]")
	for end := time.Now().Add(5 * time.Second); p.inflight.Load() > 0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end))
	}
	_, err = ec.Read(make([]byte, 1))
	require.Error(t, err, "the engine is hung up on")
	assert.Zero(t, read(p))
}

// A silent stream that the set reads ends with its server: nobody but who has the stream closes a descriptor that the set writes to.
func TestPumpIsClosed(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	if runtime.GOMAXPROCS(0) < 2 {
		t.Skip("the set keeps a P for itself")
	}
	e := newRawEngine(t)
	p, s, addr := pumpServer(t, e.url())
	resp, ec := silentStream(t, e, addr)
	require.NoError(t, s.Close())
	_, err := io.ReadAll(resp.Body)
	require.Error(t, err)
	assert.Zero(t, p.inflight.Load())
	_ = ec.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err = ec.Read(make([]byte, 1))
	require.Error(t, err)
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the engine is hung up on")
}

// read is how many streams the set reads.
func read(p *Proxy) (n int) {
	p.ends.mu.Lock()
	defer p.ends.mu.Unlock()
	for _, e := range p.ends.conns {
		if _, ok := e.e.(*pump); ok {
			n++
		}
	}
	return n
}

// With traffic the set keeps its P, without any it rests.
func TestSetRests(t *testing.T) {
	if runtime.GOMAXPROCS(0) < 2 {
		t.Skip("the set never keeps the only P")
	}
	h := newHangups(true)
	h.open()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer a.Close()
	e := new(ended)
	require.True(t, h.watch(a, e))
	rests := func(want bool) func() bool { return func() bool { return h.resting.Load() == want } }
	require.Eventually(t, rests(true), 5*time.Second, time.Millisecond, "nothing happens")
	h.request()
	require.Never(t, rests(false), 20*time.Millisecond, time.Millisecond, "one request is not worth a call")
	for range busyFrom {
		h.request()
	}
	require.Eventually(t, rests(false), 5*time.Second, 100*time.Microsecond)
	require.Eventually(t, rests(true), 5*time.Second, time.Millisecond, "they have ended")
	h.forget(a, e)
	h.shut()
}

type ended struct{}

func (*ended) hungUp() {}

// An engine that answers before it has read all of a large prompt gets the rest of it: as long as that is being written, the stream
// stays with its goroutine.
func TestPumpWaitsForTheRequest(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, addr := pumpFront(t, &url.URL{Scheme: "http", Host: l.Addr().String()})
	body := `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("a", 24<<20) + `"}]}`
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	go func() {
		_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	}()
	ec, err := l.Accept()
	require.NoError(t, err)
	defer ec.Close()
	_ = ec.SetDeadline(time.Now().Add(20 * time.Second))
	asked, err := http.ReadRequest(bufio.NewReaderSize(ec, 4096))
	require.NoError(t, err)
	_, _ = io.WriteString(ec, rawHead)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	say := func(word string) {
		event := chunk(word)
		_, _ = io.WriteString(ec, framed(event))
		_, err := io.ReadFull(resp.Body, make([]byte, len(event)))
		require.NoError(t, err)
	}
	for i := range 5 {
		say(fmt.Sprint("early ", i))
	}
	got, err := io.Copy(io.Discard, asked.Body)
	require.NoError(t, err)
	assert.EqualValues(t, len(body), got)
	say("late")
	_, _ = io.WriteString(ec, framed(finishChunk)+framed(doneChunk)+"0\r\n\r\n")
	rest, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Contains(t, string(rest), "[DONE]")
}

// A stream between two agents is read by the set of both, over TLS as well: what TLS has read ahead, many records in one read of the
// socket, comes without another event; and the connection serves the next request.
func TestPumpOverTLS(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	e := newRawEngine(t)
	entry, target, _, addr := pumpPair(t, e.url())
	for range 3 {
		c := askStream(t, addr)
		ec := <-e.conns
		_, _ = io.WriteString(ec, rawHead)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		want := 0
		for i := range 200 {
			event := chunk(fmt.Sprint("word ", i))
			_, _ = io.WriteString(ec, framed(event))
			if want += len(event); i > 100 && i%10 > 0 {
				continue // in a burst
			}
			_, err = io.ReadFull(resp.Body, make([]byte, want))
			require.NoError(t, err)
			want = 0
		}
		assert.Equal(t, 1, read(entry), "the entry's set reads it")
		assert.Equal(t, 1, read(target), "the target's set reads it")
		_, _ = io.WriteString(ec, framed(finishChunk)+framed(doneChunk)+"0\r\n\r\n")
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
		for end := time.Now().Add(5 * time.Second); entry.inflight.Load()+target.inflight.Load() > 0; time.Sleep(time.Millisecond) {
			require.True(t, time.Now().Before(end))
		}
		assert.Zero(t, read(entry)+read(target))
		_ = ec.Close()
	}
	assert.Len(t, entry.links.m[2].up.(*wireUpstream).spare, 1, "one connection served all")
}

// A silent stream that the sets of two agents read ends when a key leaves the ring of one: its client sees a cut, and both let go of it.
func TestPumpEndsWithTheKey(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	for i := range 2 {
		e := newRawEngine(t)
		entry, target, ids, addr := pumpPair(t, e.url())
		c := askStream(t, addr)
		ec := <-e.conns
		_, _ = io.WriteString(ec, rawHead)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		for i := range 5 {
			event := chunk(fmt.Sprint("word ", i))
			_, _ = io.WriteString(ec, framed(event))
			_, err = io.ReadFull(resp.Body, make([]byte, len(event)))
			require.NoError(t, err)
		}
		require.NoError(t, ids[i].SetKeys([][]byte{tlsKey('b')}))
		rest, err := io.ReadAll(resp.Body)
		require.Error(t, err)
		assert.NotContains(t, string(rest), "[DONE]")
		_, err = ec.Read(make([]byte, 1))
		require.Error(t, err, "the engine is hung up on")
		for end := time.Now().Add(5 * time.Second); entry.inflight.Load()+target.inflight.Load() > 0; time.Sleep(time.Millisecond) {
			require.True(t, time.Now().Before(end))
		}
		assert.Zero(t, read(entry)+read(target))
		assert.Zero(t, ids[0].Open()+ids[1].Open())
	}
}

// Records that come in pieces, and many at once, are read without a wait, byte for byte.
func TestSockUnderTLS(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	ids := twoIdentities(t)
	var sent bytes.Buffer
	accepted := make(chan *tls.Conn, 1)
	go func() {
		c, err := ids[1].Listener(l).Accept()
		if err != nil {
			return
		}
		s := tls.Server(&recorder{Conn: c, to: &sent}, ids[1].ServerConfig(nil, "http/1.1"))
		_ = s.Handshake()
		accepted <- s
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer raw.Close()
	s := fastConn(raw).(*sock)
	c, err := ids[0].Client(t.Context(), s, 2, "http/1.1")
	require.NoError(t, err)
	server := <-accepted
	require.NoError(t, s.leave())
	require.True(t, s.begin())
	buf := make([]byte, 16<<10)
	now := func() (got string) {
		s.dry = false
		for {
			n, err := c.Read(buf)
			got += string(buf[:n])
			if err != nil {
				require.Equal(t, errLater, err)
				return got
			}
		}
	}
	require.Empty(t, now()) // session tickets
	w := server.NetConn().(*recorder)
	w.keep = true
	for i := range 20 {
		_, _ = fmt.Fprintf(server, "record %d;", i)
	}
	got := ""
	for b := sent.Bytes(); len(b) > 0; { // 7 bytes at a time
		n := min(7, len(b))
		_, _ = w.Conn.Write(b[:n])
		b = b[n:]
		time.Sleep(100 * time.Microsecond)
		got += now()
	}
	for end := time.Now().Add(5 * time.Second); len(got) < 190 && time.Now().Before(end); {
		got += now()
	}
	want := ""
	for i := range 20 {
		want += fmt.Sprintf("record %d;", i)
	}
	require.Equal(t, want, got)
	s.done()
	require.NoError(t, c.Close())
}

// recorder keeps what is written, once keep is set, instead of sending it.
type recorder struct {
	net.Conn
	to   *bytes.Buffer
	keep bool
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.keep {
		return r.to.Write(p)
	}
	return r.Conn.Write(p)
}
