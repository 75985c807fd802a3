package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
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

// front is the clients' listener of an agent on a real socket.
type front struct {
	p    *Proxy
	addr string
	tls  *tls.Config // the client's
	raw  net.Listener
	own  *Server
}

var frontKinds = []string{"plain", "TLS"}

func newFront(t *testing.T, kind string, engine http.Handler) *front {
	t.Helper()
	tab := routing.NewTable(routing.Member{Boot: 1, Node: "a", Addr: "127.0.0.1:1"})
	pol, err := routing.NewPolicy("local")
	require.NoError(t, err)
	p, err := New(Config{Table: tab, Policy: pol, EngineURL: listenEngine(t, engine), std: *std})
	require.NoError(t, err)
	tab.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
	tab.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, time.Now())
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f := &front{p: p, addr: l.Addr().String(), raw: l}
	serve := l
	if kind == "TLS" {
		h := httptest.NewUnstartedServer(nil) // for its certificate
		h.StartTLS()
		t.Cleanup(h.Close)
		serve = tls.NewListener(FastListener(l), &tls.Config{Certificates: h.TLS.Certificates, NextProtos: []string{"http/1.1"}})
		f.tls = &tls.Config{InsecureSkipVerify: true}
	}
	f.own = p.ClientServer(NewServer(p.ClientHandler(), nil, nil))
	go func() { _ = f.own.Serve(serve) }()
	t.Cleanup(func() { _ = f.own.Close() })
	return f
}

// shutdown ends the front as an agent does, and says how long that took.
func (f *front) shutdown(t *testing.T) time.Duration {
	t.Helper()
	start := time.Now()
	LastAccepts(f.raw)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	assert.NoError(t, f.own.Shutdown(ctx))
	return time.Since(start)
}

func (f *front) dial() (net.Conn, error) {
	c, err := net.DialTimeout("tcp", f.addr, 5*time.Second)
	if err != nil || f.tls == nil {
		return c, err
	}
	return tls.Client(c, f.tls), nil
}

// ask sends one chat over a connection and reads the answer; last is what the answer says of the connection.
func ask(c net.Conn, body string) (last bool, text string, err error) {
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body); err != nil {
		return false, "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return false, "", err
	}
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %s", resp.StatusCode, b)
	}
	return resp.Close, string(b), err
}

// Clients that connect, ask and ask again all the time while a server ends get an answer or no connection, and never a
// connection without an answer.
func TestShutdownResetsNobody(t *testing.T) {
	const rounds = 2 // a second each: clients that meet the closing door try it again then
	for _, kind := range frontKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var answers atomic.Int64
			for range rounds {
				f := newFront(t, kind, answers200())
				var wg sync.WaitGroup
				for range 12 {
					wg.Go(func() {
						for {
							c, err := f.dial()
							if err != nil {
								return
							}
							for last, n := false, 0; !last && n < 3; n++ {
								time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond) // what a client may take
								if last, _, err = ask(c, chatBody(false)); err != nil {
									t.Errorf("request %d of a connection: %v", n+1, err)
									break
								}
								answers.Add(1)
							}
							_ = c.Close()
						}
					})
				}
				began := answers.Load()
				assert.Eventually(t, func() bool { return answers.Load() > began+10 }, 10*time.Second, time.Millisecond)
				f.p.SetDraining(true)
				time.Sleep(20 * time.Millisecond)
				f.shutdown(t)
				wg.Wait()
			}
			t.Logf("%d answers", answers.Load())
		})
	}
}

// HTTP/2, which net/http serves, has a word of its own for the end; nothing is lost there either.
func TestShutdownOfHTTP2(t *testing.T) {
	t.Parallel()
	f := newFront(t, "plain", answers200())
	hc := &http.Client{Transport: &http.Transport{Protocols: new(http.Protocols)}}
	hc.Transport.(*http.Transport).Protocols.SetUnencryptedHTTP2(true)
	defer hc.CloseIdleConnections()
	var answers atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				resp, err := hc.Post("http://"+f.addr+chatPath, "application/json", strings.NewReader(chatBody(false)))
				if errors.Is(err, syscall.ECONNREFUSED) {
					return
				}
				if !assert.NoError(t, err) {
					return
				}
				_, err = io.Copy(io.Discard, resp.Body)
				assert.NoError(t, err)
				_ = resp.Body.Close()
				answers.Add(1)
			}
		})
	}
	require.Eventually(t, func() bool { return answers.Load() > 10 }, 10*time.Second, time.Millisecond)
	f.p.SetDraining(true)
	time.Sleep(20 * time.Millisecond)
	f.shutdown(t)
	wg.Wait()
}

// Whoever has just connected, and whoever was told that the connection stays open, is heard for a second more.
func TestShutdownHearsTheLastWord(t *testing.T) {
	for _, kind := range frontKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			came, goOn := make(chan struct{}), make(chan struct{})
			f := newFront(t, kind, engine(func(n int, w http.ResponseWriter, _ *http.Request) {
				eventHead(w)
				say(w, chunk("a"))
				if n == 1 {
					close(came)
					<-goOn
				}
				say(w, finishChunk+doneChunk)
			}))
			streamed, err := f.dial()
			require.NoError(t, err)
			defer streamed.Close()
			first := make(chan error, 1)
			go func() {
				last, _, err := ask(streamed, chatBody(true))
				if err == nil && last {
					err = errors.New("the first answer began before the drain")
				}
				first <- err
			}()
			<-came
			time.Sleep(50 * time.Millisecond) // and its head is out
			fresh, err := f.dial()
			require.NoError(t, err)
			defer fresh.Close()
			old, err := f.dial()
			require.NoError(t, err)
			defer old.Close()
			_, _, err = ask(old, chatBody(false))
			require.NoError(t, err)

			f.p.SetDraining(true)
			done := make(chan time.Duration, 1)
			go func() { done <- f.shutdown(t) }()
			time.Sleep(lastWord / 2)
			for _, c := range []net.Conn{fresh, old} {
				last, text, err := ask(c, chatBody(false))
				require.NoError(t, err)
				assert.True(t, last, "the answer says that it is the last")
				assert.NotEmpty(t, text)
			}
			time.Sleep(lastWord)
			close(goOn)
			require.NoError(t, <-first)
			last, _, err := ask(streamed, chatBody(true))
			require.NoError(t, err, "a stream that began before the drain promised a connection that stays open")
			assert.True(t, last)
			select {
			case <-done:
			case <-time.After(5 * time.Second):
				t.Fatal("it does not end")
			}
		})
	}
}

// A connection that has long been silent ends at once, with the end of the stream and not a reset: a client that asks at
// that very moment learns that nothing was done.
func TestShutdownEndsSilentConnections(t *testing.T) {
	t.Parallel()
	f := newFront(t, "plain", answers200())
	c, err := f.dial()
	require.NoError(t, err)
	defer c.Close()
	_, _, err = ask(c, chatBody(false))
	require.NoError(t, err)
	time.Sleep(lastWord + 100*time.Millisecond)
	done := make(chan time.Duration, 1)
	go func() { done <- f.shutdown(t) }()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	var b [1]byte
	_, err = c.Read(b[:])
	require.ErrorIs(t, err, io.EOF)
	_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\n") // too late, and taken in
	require.NoError(t, err)
	_, err = c.Read(b[:])
	require.ErrorIs(t, err, io.EOF, "not a reset")
	_ = c.Close()
	assert.Less(t, <-done, lastWord)
}

func answers200() http.Handler { return answers(200, strings.Repeat("answer ", 10)) }
