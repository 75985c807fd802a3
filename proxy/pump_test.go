//go:build linux

package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
	tab := routing.NewTable(routing.Member{Boot: 1, Node: "a", Addr: "127.0.0.1:1"})
	pol, err := routing.NewPolicy("local")
	require.NoError(t, err)
	p, err = New(Config{Table: tab, Policy: pol, EngineURL: u, StreamThread: true})
	require.NoError(t, err)
	tab.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
	tab.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, time.Now())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := p.ClientServer(NewServer(p.ClientHandler(), nil, nil))
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); p.engine.close() })
	return p, l.Addr().String()
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
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	e := newRawEngine(t)
	_, addr := pumpFront(t, e.url())
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
}

// A client that takes nothing stops the engine, costs no memory, and gets every byte in the end.
func TestPumpBackPressure(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	e := newRawEngine(t)
	_, addr := pumpFront(t, e.url())
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
}

// A client that takes nothing and goes away ends its stream, though a write to it is under way.
func TestPumpHangUpWhileBlocked(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	e := newRawEngine(t)
	_, addr := pumpFront(t, e.url())
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

// A silent stream that the set reads ends with the agent's drain timeout, and its client sees that it is not whole.
func TestPumpIsCut(t *testing.T) {
	if *std {
		t.Skip("our own HTTP/1.1")
	}
	e := newRawEngine(t)
	p, addr := pumpFront(t, e.url())
	c := askStream(t, addr)
	ec := <-e.conns
	_, _ = io.WriteString(ec, rawHead)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	for i := range 3 {
		event := chunk(fmt.Sprint("word ", i))
		_, _ = io.WriteString(ec, framed(event))
		_, err = io.ReadFull(resp.Body, make([]byte, len(event)))
		require.NoError(t, err)
	}
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
