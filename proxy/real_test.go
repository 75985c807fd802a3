package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// realPair starts two agents on loopback sockets; the first sends everything to the second, whose engine is at u.
// It returns the entry's client address, and the target's.
func realPair(t *testing.T, u *url.URL, tune func(c *Config)) (entry, target string, agents [2]*Proxy) {
	t.Helper()
	var peers, clients [2]net.Listener
	for i := range peers {
		var err error
		peers[i], err = net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		clients[i], err = net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
	}
	for i := range peers {
		m := func(j int) routing.Member {
			return routing.Member{Boot: uint64(j + 1), Node: fmt.Sprint("n", j+1), Addr: peers[j].Addr().String()}
		}
		tab := routing.NewTable(m(i))
		tab.SetMember(m(1-i), time.Now())
		cfg := Config{Table: tab, Policy: inOrder{2}, EngineURL: u}
		if tune != nil {
			tune(&cfg)
		}
		p, err := New(cfg)
		require.NoError(t, err)
		agents[i] = p
		var client, peer server = NewServer(p.ClientHandler(), nil, nil), NewServer(p.PeerHandler(), nil, nil)
		if !*std {
			client, peer = p.ClientServer(client.(*http.Server)), p.PeerServer(peer.(*http.Server), LinkPath)
		}
		for s, l := range map[server]net.Listener{client: clients[i], peer: peers[i]} {
			go func() { _ = s.Serve(l) }()
			t.Cleanup(func() { _ = s.Close() })
		}
		t.Cleanup(func() { p.engine.close(); p.links.closeAll() })
	}
	return clients[0].Addr().String(), clients[1].Addr().String(), agents
}

// listenEngine serves an engine on a loopback socket.
func listenEngine(t *testing.T, h http.Handler) *url.URL {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	srv := NewServer(h, nil, nil)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return &url.URL{Scheme: "http", Host: l.Addr().String()}
}

// An engine that answers before it has read the request cuts no stream: 400 at once, several times over, one hop and two.
func TestEarlyAnswerCutsNothing(t *testing.T) {
	rounds, streams := 10, 400
	if testing.Short() {
		rounds = 1
	}
	full := chunk("a") + chunk("b") + finishChunk + doneChunk
	u := listenEngine(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		eventHead(w)
		say(w, chunk("a"))
		say(w, chunk("b"))
		_, _ = io.Copy(io.Discard, r.Body)
		say(w, finishChunk+doneChunk)
	}))
	entry, target, agents := realPair(t, u, nil)
	body := `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("x", 16<<10) + `"}]}`
	tr := &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true}
	defer tr.CloseIdleConnections()
	hc := &http.Client{Transport: tr}
	var cut atomic.Int32
	for round := range rounds {
		addr := []string{entry, target}[round%2]
		var wg sync.WaitGroup
		for range streams {
			wg.Go(func() {
				resp, err := hc.Post("http://"+addr+chatPath, "application/json", strings.NewReader(body))
				if err != nil {
					if cut.Add(1) <= 3 {
						t.Logf("round %d: %v", round, err)
					}
					return
				}
				defer resp.Body.Close()
				if b, err := io.ReadAll(resp.Body); err != nil || string(b) != full {
					if cut.Add(1) <= 3 {
						t.Logf("round %d: %s %q %v", round, resp.Status, b, err)
					}
				}
			})
		}
		wg.Wait()
	}
	assert.Zero(t, cut.Load(), "of %d streams", rounds*streams)
	for _, p := range agents {
		require.NoError(t, p.Wait(t.Context()))
		assert.Zero(t, p.Load().Running+p.Load().Waiting)
	}
	m := agents[0].Metrics()
	assert.Zero(t, m.Retries[retryCut]+m.Retries[retryDial], "nothing had to be repeated")
}

// llama.cpp does not notice a plain close while it works on an answer that is not streamed: ours is a reset.
func TestHangUpResetsTheEngine(t *testing.T) {
	for name, two := range map[string]bool{"one hop": false, "two hops": true} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			seen := make(chan error, 1)
			go func() {
				c, err := l.Accept()
				if err != nil {
					seen <- err
					return
				}
				defer c.Close()
				_, err = io.Copy(io.Discard, c) // no answer, ever
				seen <- err
			}()
			entry, target, _ := realPair(t, &url.URL{Scheme: "http", Host: l.Addr().String()}, nil)
			addr := target
			if two {
				addr = entry
			}
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(100*time.Millisecond, cancel)
			req, _ := http.NewRequestWithContext(ctx, "POST", "http://"+addr+chatPath, strings.NewReader(chatBody(false)))
			_, err = http.DefaultTransport.RoundTrip(req)
			require.ErrorIs(t, err, context.Canceled)
			hungUp := time.Now()
			select {
			case err := <-seen:
				assert.ErrorIs(t, err, syscall.ECONNRESET)
				assert.Less(t, time.Since(hungUp), 200*time.Millisecond)
			case <-time.After(5 * time.Second):
				t.Fatal("the engine never saw the hang-up")
			}
		})
	}
}

// The memory of an exchange serves one request after another: what ends one from outside, a hang-up or its engine's reset, must
// never end the next.
func TestEndsReachNobodyElse(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(time.Duration(rand.Int64N(int64(time.Millisecond))))
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, okAnswer)
	}))
	defer engine.Close()
	u, err := url.Parse(engine.URL)
	require.NoError(t, err)
	entry, target, agents := realPair(t, u, nil)
	for _, addr := range []string{target, entry} {
		done := make(chan struct{})
		var rude, polite sync.WaitGroup
		for range 4 {
			rude.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
					}
					c, err := net.Dial("tcp", addr)
					if err != nil {
						continue
					}
					body := chatBody(false)
					fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
					time.Sleep(time.Duration(rand.Int64N(int64(2 * time.Millisecond))))
					_ = c.Close()
				}
			})
			polite.Go(func() {
				for range 60 {
					resp, err := http.Post("http://"+addr+chatPath, "application/json", strings.NewReader(chatBody(false)))
					if !assert.NoError(t, err) {
						return
					}
					b, err := io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					assert.NoError(t, err)
					assert.Equal(t, 200, resp.StatusCode)
					assert.Len(t, b, len(okAnswer))
				}
			})
		}
		polite.Wait()
		close(done)
		rude.Wait()
	}
	for _, p := range agents {
		require.NoError(t, p.Wait(t.Context()))
		assert.Zero(t, p.Load().Running+p.Load().Waiting)
	}
}

// The engine may listen on a Unix socket.
func TestUnixSocketEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "e.sock")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	srv := &http.Server{Handler: answers(200, okAnswer)}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	entry, _, _ := realPair(t, &url.URL{Scheme: "unix", Path: path}, nil)
	resp, err := http.Post("http://"+entry+chatPath, "application/json", strings.NewReader(chatBody(false)))
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	sameBytes(t, okAnswer, string(b))
}

// C16: an early 429 to a body that waits for 100-continue, many times in parallel.
func TestC16ExpectContinue(t *testing.T) {
	u := listenEngine(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }))
	entry, _, _ := realPair(t, u, nil)
	head := readCase(t, "http/expect-continue.txt")
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 200 / 16 {
				c, err := net.Dial("tcp", entry)
				if !assert.NoError(t, err) {
					return
				}
				_, _ = c.Write(head)
				br := bufio.NewReader(c)
				resp, err := http.ReadResponse(br, nil)
				if assert.NoError(t, err) && resp.StatusCode == 100 {
					_, _ = c.Write(make([]byte, 2<<20))
					resp, err = http.ReadResponse(br, nil)
				}
				if assert.NoError(t, err) {
					assert.Equal(t, 429, resp.StatusCode)
				}
				_ = c.Close()
			}
		})
	}
	wg.Wait()
}

// C40: WebSockets are tunnelled over one hop; early bytes arrive, and a refused upgrade is an ordinary answer.
func TestC40WebSocket(t *testing.T) {
	u := listenEngine(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") || r.URL.Query().Get("model") != "m" {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-Websocket-Accept: x\r\n\r\n")
		_, _ = io.Copy(c, rw) // echo
	}))
	entry, target, agents := realPair(t, u, nil)
	for _, addr := range []string{target, entry} {
		for _, model := range []string{"m", "other"} {
			c, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			_, err = fmt.Fprintf(c, "GET /v1/realtime?model=%s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\nearly", model)
			require.NoError(t, err)
			br := bufio.NewReader(c)
			resp, err := http.ReadResponse(br, nil)
			require.NoError(t, err)
			if model == "other" {
				assert.Equal(t, 403, resp.StatusCode)
				_ = c.Close()
				continue
			}
			require.Equal(t, 101, resp.StatusCode)
			assert.Equal(t, "x", resp.Header.Get("Sec-Websocket-Accept"))
			buf := make([]byte, 5)
			_, err = io.ReadFull(br, buf)
			require.NoError(t, err)
			assert.Equal(t, "early", string(buf))
			_, _ = io.WriteString(c, "later")
			_, err = io.ReadFull(br, buf)
			require.NoError(t, err)
			assert.Equal(t, "later", string(buf))
			_ = c.Close()
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for _, p := range agents {
		require.NoError(t, p.Wait(ctx))
	}
}

// C41: trailers that nobody announced reach the client over HTTP/2 and over chunked HTTP/1.1, one and two hops; gRPC
// goes both ways at once.
func TestC41Trailers(t *testing.T) {
	u := listenEngine(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isGRPC(fromNetHeader(r.Header)) {
			w.Header().Set("Content-Type", "application/grpc")
			flush(w)
			buf := make([]byte, 64)
			for {
				n, err := r.Body.Read(buf)
				_, _ = w.Write(buf[:n])
				flush(w)
				if err != nil {
					break
				}
			}
			w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
			return
		}
		say(w, "data: x\n\n")
		w.Header().Set(http.TrailerPrefix+"X-Late", "yes")
	}))
	entry, target, _ := realPair(t, u, nil)
	for _, addr := range []string{target, entry} {
		for _, h2 := range []bool{false, true} {
			hc := (&fleet{net: &memNet{}}).client(h2)
			hc.Transport.(*http.Transport).DialContext = nil
			resp, err := hc.Post("http://"+addr+chatPath, "application/json", strings.NewReader(chatBody(true)))
			require.NoError(t, err)
			_, err = io.ReadAll(resp.Body)
			require.NoError(t, err)
			assert.Equal(t, "yes", resp.Trailer.Get("X-Late"), "%s h2=%v", addr, h2)
			hc.CloseIdleConnections()
			if !h2 {
				continue
			}
			pr, pw := io.Pipe()
			req, _ := http.NewRequest("POST", "http://"+addr+"/inference.Service/Chat", pr)
			req.Header.Set("Content-Type", "application/grpc")
			req.Header.Set("Te", "trailers")
			resp, err = hc.Do(req)
			require.NoError(t, err, "the head comes while the request is open")
			for _, msg := range []string{"one", "two!"} {
				_, _ = io.WriteString(pw, msg)
				buf := make([]byte, len(msg))
				_, err = io.ReadFull(resp.Body, buf)
				require.NoError(t, err)
				assert.Equal(t, msg, string(buf))
			}
			_ = pw.Close()
			_, err = io.ReadAll(resp.Body)
			require.NoError(t, err)
			assert.Equal(t, "0", resp.Trailer.Get("Grpc-Status"))
			hc.CloseIdleConnections()
		}
	}
}

// An engine that resets in the middle of its answer's head or body, on real sockets.
func TestResetAnswers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for i := 0; ; i++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = http.ReadRequest(bufio.NewReader(c))
			switch i % 3 {
			case 0:
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Le")
			case 1:
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
				time.Sleep(20 * time.Millisecond)
			case 2:
				_, _ = io.WriteString(c, "not HTTP at all\r\n\r\n")
			}
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}()
	_, target, agents := realPair(t, &url.URL{Scheme: "http", Host: l.Addr().String()}, nil)
	for i, want := range []string{"502", "cut", "502"} {
		resp, err := http.Post("http://"+target+chatPath, "application/json", strings.NewReader(strings.Replace(chatBody(false), "hello", fmt.Sprint(i), 1)))
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if want == "cut" {
			assert.Error(t, err)
			assert.True(t, errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET), "%v", err)
			continue
		}
		assert.Equal(t, 502, resp.StatusCode, "%d", i)
		assert.Equal(t, "upstream_broken", resp.Header.Get(headerReason))
	}
	assert.Zero(t, agents[1].Load().Running+agents[1].Load().Waiting)
}

// A kept connection that has ended, or on which something waits that nobody asked for, is found out before anything is
// written to it: the request goes over another one at once, which is no replay.
func TestKeptConnectionIsLookedAtBeforeUse(t *testing.T) {
	for name, leave := range map[string]func(c net.Conn){
		"ended": func(c net.Conn) { _ = c.Close() },
		"talked": func(c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			var conns atomic.Int32
			left := make(chan struct{}, 8)
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					defer c.Close()
					conns.Add(1)
					go func() {
						r, err := http.ReadRequest(bufio.NewReader(c))
						if err != nil {
							return
						}
						_, _ = io.Copy(io.Discard, r.Body)
						_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
						time.Sleep(20 * time.Millisecond) // the answer is taken in before
						leave(c)
						left <- struct{}{}
					}()
				}
			}()
			_, _, agents := realPair(t, &url.URL{Scheme: "http", Host: l.Addr().String()}, nil)
			for i := range 3 {
				if i > 0 {
					<-left
					time.Sleep(20 * time.Millisecond) // what it did has arrived
				}
				x := &Outgoing{Method: "POST", Target: "/v1/chat/completions", Host: "x"}
				a, err := agents[0].engine.Send(t.Context(), x)
				require.NoError(t, err)
				b, err := io.ReadAll(a.Body)
				require.NoError(t, err)
				assert.Equal(t, "{}", string(b))
				require.NoError(t, a.Body.Close())
			}
			assert.EqualValues(t, 3, conns.Load())
		})
	}
}
