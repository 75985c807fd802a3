package agent

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// moody is a simulated engine whose pages about itself can hang while it works.
type moody struct {
	*httptest.Server
	pages atomic.Bool // /health and /metrics hang
	only  atomic.Pointer[string]
}

func startMoody(t *testing.T, sim *simEngine) *moody {
	t.Helper()
	u, err := url.Parse(sim.url())
	require.NoError(t, err)
	inner := httputil.NewSingleHostReverseProxy(u)
	inner.FlushInterval = -1
	m := &moody{}
	m.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		only := m.only.Load()
		about := r.Method == http.MethodGet && (r.URL.Path == "/health" || r.URL.Path == "/metrics")
		if about && m.pages.Load() || only != nil && r.URL.Path == *only {
			<-r.Context().Done()
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(m.Close)
	return m
}

// C51: an engine that answers no question about itself, but whose tokens flow, stays in; when tokens stop too, it goes after
// three checks and not after one.
func TestC51TokensBeatProbes(t *testing.T) {
	t.Parallel()
	m := startMoody(t, startSim(t, slowStream()))
	a := start(t, loopbackConfig(m.URL), Options{})
	a.untilReady()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 3 { // always one under way
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 500 * time.Millisecond)
			for {
				select {
				case <-stop:
					return
				default:
				}
				code, _ := a.chat(streamBody)
				assert.Equal(t, 200, code)
			}
		})
	}
	time.Sleep(time.Second)
	m.pages.Store(true)
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		ok, why := a.Ready()
		require.True(t, ok, why)
	}
	close(stop)
	wg.Wait()
	quiet := time.Now()
	a.eventually(15*time.Second, "unreadiness", func() bool { ok, _ := a.Ready(); return !ok })
	assert.Greater(t, time.Since(quiet), time.Second, "not after one check")
}

// C52 and C54: while the model loads, the agent lives, is not ready, and answers each request at once: by itself with a 503
// that says when to come again, or through a replica that can. It is starting, not failing, and becomes ready by itself.
func TestC52AndC54LoadingIsNoFailure(t *testing.T) {
	t.Parallel()
	sim := startSim(t, fast())
	require.NoError(t, sim.server.Inject(enginesim.Fault{Kind: "loading"}))
	a := start(t, loopbackConfig(sim.url()), Options{})
	res, err := http.Post("http://"+a.Addresses().Client+"/v1/chat/completions", "application/json", strings.NewReader(chatBody))
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 503, res.StatusCode)
	assert.NotEmpty(t, res.Header.Get("Retry-After"))
	code, _ := a.get("/readyz?entry=1")
	assert.Equal(t, 503, code, "nobody can answer")

	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.Join, cfg.NodeName = []string{a.Addresses().Gossip}, "other"
	b := start(t, cfg, Options{})
	b.untilReady()
	a.eventually(10*time.Second, "the other replica", func() bool { code, _ := a.get("/readyz?entry=1"); return code == 200 })
	var slowest time.Duration
	for range 15 {
		began := time.Now()
		code, body := a.chat(chatBody)
		slowest = max(slowest, time.Since(began))
		require.Equal(t, 200, code, body)
		code, _ = a.get("/livez")
		require.Equal(t, 200, code)
		code, _ = a.get("/readyz")
		require.Equal(t, 503, code)
		for _, p := range b.Status().Peers {
			if !p.Self {
				require.NotEqual(t, "ejected", p.State)
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Logf("slowest answer while its own engine loads: %v", slowest)
	assert.Less(t, slowest, 2*time.Second)
	assert.Zero(t, a.proxy.Load().Accepted, "nothing was tried at the loading engine")
	assert.Equal(t, "starting", a.Status().State)
	sim.server.Clear("")
	a.untilReady()
	code, body := a.chat(chatBody)
	assert.Equal(t, 200, code, body)
}

// C59: a metrics page that hangs delays neither requests nor gossip; what it said gets older where everybody sees it, and the
// agent's own counts, which its records carry, go on.
func TestC59SlowPageDelaysNothing(t *testing.T) {
	t.Parallel()
	m := startMoody(t, startSim(t, fast()))
	a := start(t, loopbackConfig(m.URL), Options{})
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.Join, cfg.NodeName = []string{a.Addresses().Gossip}, "other"
	b := start(t, cfg, Options{})
	a.untilReady()
	b.untilReady()
	b.eventually(5*time.Second, "knowing the other", func() bool { p := b.table.Peer(a.boot); return p != nil && p.Fresh(time.Now()) })
	page := "/metrics"
	m.only.Store(&page)
	var took []time.Duration
	oldest := time.Duration(0)
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		began := time.Now()
		code, body := a.chat(chatBody)
		took = append(took, time.Since(began))
		require.Equal(t, 200, code, body)
		if p := b.table.Peer(a.boot); p != nil {
			oldest = max(oldest, p.Age(time.Now()).V)
		}
	}
	slices.Sort(took)
	s := a.Status().Engine
	t.Logf("%d requests, median %v; the engine's page is %d ms old, our records at most %v", len(took), took[len(took)/2], s.AgeMS.V, oldest)
	assert.Less(t, took[len(took)/2], 200*time.Millisecond)
	assert.Greater(t, s.AgeMS.V, int64(2500), "its age is shown")
	assert.NotEmpty(t, s.Error)
	assert.Less(t, oldest, 3*time.Second, "records came as before")
	ok, why := a.Ready()
	assert.True(t, ok, why)
}

// C74: 200 adapters with names of 60 characters, separators, spaces and other scripts among them, and a long zone: tags and
// records do not grow with them. Lists are pulled by their digest, and every name is routed to the one that has it.
func TestC74ManyLongNames(t *testing.T) {
	t.Parallel()
	var names []string
	for i := range 200 {
		n := fmt.Sprintf("team-%d/модель:7b, q=4 \"x\"|%d;", i, i)
		names = append(names, n+strings.Repeat("y", 60-len([]rune(n))))
	}
	engine := func(models ...string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v1/models" {
				var list []map[string]any
				for _, m := range models {
					list = append(list, map[string]any{"id": m, "object": "model"})
				}
				_ = json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": list})
				return
			}
			if r.Method != http.MethodPost {
				http.NotFound(w, r)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}`)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	cfg := loopbackConfig(engine("base"))
	cfg.GossipKey = testKey
	a := start(t, cfg, Options{})
	cfg.EngineURL, cfg.Join = engine(append([]string{"base"}, names...)...), []string{a.Addresses().Gossip}
	cfg.NodeName, cfg.Zone = strings.Repeat("n", 60), strings.Repeat("z", 60)
	b := start(t, cfg, Options{})
	a.untilReady()
	b.untilReady()
	a.eventually(5*time.Second, "all names", func() bool {
		for _, p := range a.Status().Peers {
			if !p.Self && len(p.Models) == 201 {
				return true
			}
		}
		return false
	})
	before := b.proxy.Load().Accepted
	for i, n := range names {
		body, err := json.Marshal(map[string]any{"model": n, "messages": []map[string]string{{"role": "user", "content": "x"}}})
		require.NoError(t, err)
		code, text := a.chat(string(body))
		require.Equal(t, 200, code, "%s: %s", n, text)
		require.Equal(t, before+uint32(i)+1, b.proxy.Load().Accepted, n)
	}
}

// C83: SIGTERM during a stream, while new requests keep coming for as long as it lasts: the stream ends whole, the new ones
// are answered by the other replica, which knows of the drain at once, and Run ends without an error.
func TestC83DrainUnderTraffic(t *testing.T) {
	t.Parallel()
	agents, _ := fleetOf(t, 2, slowStream(), nil)
	a, b := agents[0], agents[1]
	res, err := http.Post("http://"+a.Addresses().Client+"/v1/chat/completions", "application/json", strings.NewReader(streamBody))
	require.NoError(t, err)
	defer res.Body.Close()
	body := bufio.NewReader(res.Body)
	_, err = body.ReadString('\n')
	require.NoError(t, err)
	a.cancel()
	b.eventually(2*time.Second, "news of the drain", func() bool { return b.of(a).State == "draining" })
	done := make(chan string, 1)
	go func() { rest, _ := io.ReadAll(body); done <- string(rest) }()
	n := 0
	for rest := ""; rest == ""; {
		code, text := a.chat(chatBody)
		if code == 0 { // the stream has ended and so has the agent
			rest = <-done
			done <- rest
			assert.Contains(t, rest, "data: [DONE]")
			break
		}
		assert.Equal(t, 200, code, text)
		n++
		select {
		case rest = <-done:
			assert.Contains(t, rest, "data: [DONE]")
			assert.NotContains(t, rest, "error")
		default:
		}
	}
	assert.Greater(t, n, 3)
	require.NoError(t, a.stop())
	assert.NotContains(t, a.log.String(), MsgDrainCut)
	t.Logf("%d requests answered while it drained", n)
}

// C86: probes have a listener of their own and wait for nothing that requests hold.
func TestC86ProbesUnderLoad(t *testing.T) {
	t.Parallel()
	const streams = 400
	release := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/models":
			_, _ = io.WriteString(w, `{"data":[{"id":"sim"}]}`)
		case r.Method != http.MethodPost:
			http.NotFound(w, r)
		default:
			b, _ := io.ReadAll(r.Body)
			if !strings.Contains(string(b), `"stream":true`) {
				_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}`)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			tick := time.NewTicker(200 * time.Millisecond)
			defer tick.Stop()
			for {
				_, _ = io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
				_ = http.NewResponseController(w).Flush()
				select {
				case <-tick.C:
				case <-release:
					_, _ = io.WriteString(w, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
					return
				case <-r.Context().Done():
					return
				}
			}
		}
	}))
	t.Cleanup(engine.Close)
	cfg := loopbackConfig(engine.URL)
	cfg.Gate = "off"
	a := start(t, cfg, Options{})
	a.untilReady()
	var wg sync.WaitGroup
	for range streams {
		wg.Go(func() {
			code, body := a.chat(streamBody)
			assert.Equal(t, 200, code)
			assert.Contains(t, body, "[DONE]")
		})
	}
	a.eventually(20*time.Second, "all streams", func() bool { return a.proxy.Load().Running >= streams })
	var took []time.Duration
	for range 40 {
		began := time.Now()
		code, body := a.get("/livez")
		took = append(took, time.Since(began))
		require.Equal(t, 200, code, body)
		time.Sleep(20 * time.Millisecond)
	}
	close(release)
	wg.Wait()
	slices.Sort(took)
	t.Logf("%d streams: probes took %v at the median, %v at most", streams, took[len(took)/2], took[len(took)-1])
	assert.Less(t, took[len(took)/2], 200*time.Millisecond)
	assert.Less(t, took[len(took)-1], time.Second, "the probe's own limit")
}
