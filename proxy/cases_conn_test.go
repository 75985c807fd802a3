package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// C35: an engine that closes idle connections after its usual 5 s never meets a request on one of ours, since ours are given
// up after 4 s; one that closes after 1 s may, and then the request goes once more on a fresh connection, which is safe as
// nothing was answered (C36). So the time needs no setting.
func TestC35IdleConnections(t *testing.T) {
	for _, idle := range []time.Duration{time.Second, 5 * time.Second} {
		hops(t, func(t *testing.T, order []uint64, target int) {
			e := answers(200, okAnswer)
			e.idle = idle
			f := newFleet(t, order, nil, pair(target, e)...)
			rnd := rand.New(rand.NewPCG(1, 2))
			const posts = 1000
			for range posts {
				resp, _, err := f.get(chatBody(false))
				require.NoError(t, err)
				require.Equal(t, 200, resp.StatusCode)
				time.Sleep(idle - 100*time.Millisecond + time.Duration(rnd.Int64N(int64(200*time.Millisecond))))
			}
			assert.Equal(t, posts, e.count(), "each ran once")
			if idle == 5*time.Second {
				assert.Zero(t, f.metrics(target).Retries[retryReused], "no dead connection was ever used")
			}
			f.idle()
		})
	}
}

// C37: while an agent drains, kept connections of clients stay open; the next answer on each carries Connection: close, and
// one on which nothing comes is left alone. Nobody sees a reset or an end in place of an answer.
func TestC37KeptConnectionsInADrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, okAnswer)
		f := newFleet(t, []uint64{2}, nil, answers(200, "1"), e)
		var dials atomic.Int32
		tr := &http.Transport{MaxIdleConnsPerHost: 100, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return f.net.dial(ctx, network, addr)
		}}
		hc := &http.Client{Transport: tr}
		post := func() (closes bool) {
			resp, err := hc.Post("http://"+f.clients[0]+chatPath, "application/json", bytes.NewReader([]byte(chatBody(false))))
			if !assert.NoError(t, err) {
				return false
			}
			_, err = io.Copy(io.Discard, resp.Body)
			assert.NoError(t, err)
			assert.NoError(t, resp.Body.Close())
			assert.Equal(t, 200, resp.StatusCode)
			return resp.Close
		}
		const clients, seconds = 50, 20
		var wg sync.WaitGroup
		var closed atomic.Int32
		start := time.Now()
		for i := range clients {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 20 * time.Millisecond)
				for range seconds {
					began := time.Now()
					closes := post()
					assert.Equal(t, began.Sub(start) >= 10*time.Second, closes, "at %v", began.Sub(start))
					if closes {
						closed.Add(1)
					}
					time.Sleep(time.Second)
				}
			})
		}
		time.Sleep(10*time.Second - time.Millisecond)
		before := dials.Load()
		idle, err := f.net.dial(t.Context(), "", f.clients[0])
		require.NoError(t, err)
		served := func() string {
			go func() {
				_, _ = fmt.Fprintf(idle, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(chatBody(false)), chatBody(false))
			}()
			var b [4096]byte
			n, err := idle.Read(b[:])
			assert.NoError(t, err)
			return string(b[:n])
		}
		assert.Contains(t, served(), "HTTP/1.1 200")
		f.agents[0].SetDraining(true)
		wg.Wait()
		assert.LessOrEqual(t, before, int32(clients), "connections were kept before")
		assert.NotZero(t, closed.Load())
		assert.Contains(t, served(), "Connection: close", "the idle connection was left alone, and is served once more")
		tr.CloseIdleConnections()
		f.idle()
	})
}

// grpcPost sends one gRPC request to the first agent; those go over HTTP/2 all the way.
func (f *fleet) grpcPost(hc *http.Client) error {
	req, err := http.NewRequest("POST", "http://"+f.clients[0]+"/inference.GRPCInferenceService/ModelInfer", bytes.NewReader([]byte("\x00\x00\x00\x00\x02hi")))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/grpc")
	resp, err := hc.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != 200 || string(b) != "ok") {
		err = fmt.Errorf("%d %s", resp.StatusCode, b)
	}
	return err
}

// h2Engine puts an HTTP/2 engine in the place of the first replica's.
func h2Engine(t *testing.T, order []uint64, streams int, h http.Handler) *fleet {
	t.Helper()
	f := newFleet(t, order, func(i int, c *Config) {
		if i == len(order)-1 {
			c.EngineURL = &url.URL{Scheme: "http", Host: "h2engine:80"}
		}
		c.AllowPaths = "/inference.*"
	}, answers(500, ""), answers(500, ""))
	var ps http.Protocols
	ps.SetUnencryptedHTTP2(true)
	s := &http.Server{Handler: h, Protocols: &ps, HTTP2: &http.HTTP2Config{MaxConcurrentStreams: streams},
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, connStreams{}, new(atomic.Int32))
		}}
	f.serve(s, f.net.listen("h2engine:80"))
	return f
}

type connStreams struct{}

// C38: an HTTP/2 engine that ends its connection gracefully (GOAWAY) after every 100 requests: streams up to the last one
// finish, the others go on a new connection; nothing fails and nothing runs twice.
func TestC38GracefulGoAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ran, turned atomic.Int32
		f := h2Engine(t, []uint64{1}, 250, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			ran.Add(1)
			if r.Context().Value(connStreams{}).(*atomic.Int32).Add(1)%100 == 0 {
				turned.Add(1)
				w.Header().Set("Connection", "close") // Go's server says GOAWAY for it
			}
			time.Sleep(time.Duration(rand.N(5)) * time.Millisecond)
			_, _ = io.WriteString(w, "ok")
		}))
		hc := f.client(true)
		const workers, each = 32, 60
		var wg sync.WaitGroup
		var failed atomic.Int32
		for range workers {
			wg.Go(func() {
				for range each {
					if err := f.grpcPost(hc); err != nil {
						failed.Add(1)
						t.Log(err)
					}
				}
			})
		}
		wg.Wait()
		hc.CloseIdleConnections()
		assert.Zero(t, failed.Load())
		assert.EqualValues(t, workers*each, ran.Load(), "each ran once")
		assert.Greater(t, turned.Load(), int32(10))
		f.idle()
	})
}

// C44: an HTTP/2 engine that allows 10 streams a connection never sees more; what is beyond them goes over another
// connection, and nothing fails.
func TestC44StreamLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var most atomic.Int32
		f := h2Engine(t, []uint64{1}, 10, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n := r.Context().Value(connStreams{}).(*atomic.Int32)
			most.Store(max(most.Load(), n.Add(1)))
			defer n.Add(-1)
			_, _ = io.Copy(io.Discard, r.Body)
			time.Sleep(50 * time.Millisecond)
			_, _ = io.WriteString(w, "ok")
		}))
		hc := f.client(true)
		var wg sync.WaitGroup
		var worst atomic.Int64
		for range 100 {
			wg.Go(func() {
				for range 10 {
					began := time.Now()
					assert.NoError(t, f.grpcPost(hc))
					worst.Store(max(worst.Load(), int64(time.Since(began))))
				}
			})
		}
		wg.Wait()
		hc.CloseIdleConnections()
		t.Logf("at most %d streams a connection; slowest of 1,000 requests of 50 ms with 100 at once: %v", most.Load(), time.Duration(worst.Load()))
		assert.LessOrEqual(t, most.Load(), int32(10))
		assert.Less(t, time.Duration(worst.Load()), 3*time.Second, "who was refused a stream waits about 1 s")
		f.idle()
	})
}

// C55: 500 clients in the first second of two cold replicas that refuse half of what comes. Busy is not broken, so nobody is
// shut out for long, and with the patience of the official clients (two repeats, at most 8 s between) at least 99 % succeed.
func TestC55ColdStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		cold := func() *scripted {
			return engine(func(n int, w http.ResponseWriter, _ *http.Request) {
				if time.Since(start) < time.Second && n%2 == 0 {
					w.WriteHeader(503)
					return
				}
				time.Sleep(200 * time.Millisecond)
				_, _ = io.WriteString(w, okAnswer)
			})
		}
		auto, err := routing.NewPolicy("auto")
		require.NoError(t, err)
		f := newFleet(t, nil, func(_ int, c *Config) {
			c.Policy = auto
			for b := uint64(1); b <= 2; b++ {
				c.Table.SetModels(b, []routing.Model{{ID: "m"}}, 0, start)
				c.Table.Update(routing.Report{Boot: b, Seq: 1, State: routing.StateReady, Heartbeat: time.Minute}, start)
			}
		}, cold(), cold())
		hc := f.client(false)
		call := func(i int) bool {
			for try := range 3 {
				resp, err := hc.Post("http://"+f.clients[i%2]+chatPath, "application/json", bytes.NewReader([]byte(chatBody(false))))
				if err != nil {
					return false
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				if resp.StatusCode == 200 {
					return true
				}
				wait := min(8*time.Second, 500*time.Millisecond<<try)
				if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
					wait = time.Duration(s) * time.Second
				}
				time.Sleep(wait)
			}
			return false
		}
		var wg sync.WaitGroup
		var ok atomic.Int32
		for i := range 500 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 2 * time.Millisecond)
				if call(i) {
					ok.Add(1)
				}
			})
		}
		wg.Wait()
		t.Logf("%d of 500 succeeded", ok.Load())
		assert.GreaterOrEqual(t, ok.Load(), int32(495))
		f.idle()
	})
}

// C95: a session key (header, or a field of the body) brings each of 50 requests to one replica while that has room; a
// request without a key goes anywhere. There is no lifetime to set: a key is a place on the ring, not an entry that ends.
func TestC95SessionsStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy, err := routing.NewPolicy("consistent_hash")
		require.NoError(t, err)
		salt := NewPrefixSalt([]byte("s"))
		engines := []http.Handler{answers(200, okAnswer), answers(200, okAnswer), answers(200, okAnswer)}
		f := newFleet(t, nil, func(_ int, c *Config) {
			c.Policy, c.Salt = policy, salt
			now := time.Now()
			for b := uint64(1); b <= 3; b++ {
				c.Table.SetModels(b, []routing.Model{{ID: "m"}}, 0, now)
				c.Table.Update(routing.Report{Boot: b, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, now)
			}
		}, engines...)
		at := func(body string, header ...string) (boots map[string]int) {
			boots = map[string]int{}
			for range 50 {
				resp, _, err := f.get(body, header...)
				require.NoError(t, err)
				require.Equal(t, 200, resp.StatusCode)
				p := f.lastPick()
				boots[p.Attempts[0].Node]++
				assert.Equal(t, routing.ReasonHash, p.Attempts[0].Reason, "why is told")
			}
			return boots
		}
		byHeader := at(chatBody(false), headerSession, "alice")
		assert.Len(t, byHeader, 1)
		byUser := at(`{"model":"m","user":"alice","messages":[{"role":"user","content":"x"}]}`)
		assert.Equal(t, byHeader, byUser, "the same key, wherever it stands")
		f.idle()
	})
}
