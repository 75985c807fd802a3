package agent

import (
	"bufio"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// slowStream is an engine whose answer of 30 tokens takes 1.5 s.
func slowStream() enginesim.ServerConfig {
	c := fast()
	c.Params = enginesim.Rates(100_000, 50*time.Millisecond, 8)
	return c
}

const streamBody = `{"model":"sim","messages":[{"role":"user","content":"hello there"}],"max_tokens":30,"ignore_eos":true,"stream":true}`

// A drain lets the stream under way end, refuses readiness at once, and then Run returns nil.
func TestDrainLetsStreamsEnd(t *testing.T) {
	t.Parallel()
	r := start(t, loopbackConfig(startSim(t, slowStream()).url()), Options{})
	r.untilReady()
	res, err := http.Post("http://"+r.Addresses().Client+"/v1/chat/completions", "application/json", strings.NewReader(streamBody))
	require.NoError(t, err)
	defer res.Body.Close()
	body := bufio.NewReader(res.Body)
	_, err = body.ReadString('\n')
	require.NoError(t, err)

	r.cancel() // SIGTERM
	r.eventually(time.Second, "draining", func() bool { code, b := r.get("/readyz"); return code == 503 && b == "not ready: draining\n" })
	assert.Equal(t, "draining", r.Status().State)
	rest, err := io.ReadAll(body)
	require.NoError(t, err)
	assert.Contains(t, string(rest), "data: [DONE]")
	assert.NotContains(t, string(rest), "error")
	assert.NoError(t, r.stop())
	assert.NotContains(t, r.log.String(), MsgDrainCut)
}

// What is left at the drain timeout is broken off, and never looks whole.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	cfg := loopbackConfig(startSim(t, slowStream()).url())
	cfg.DrainTimeout = 300 * time.Millisecond
	r := start(t, cfg, Options{})
	r.untilReady()
	res, err := http.Post("http://"+r.Addresses().Client+"/v1/chat/completions", "application/json", strings.NewReader(strings.Replace(streamBody, "30", "3000", 1)))
	require.NoError(t, err)
	defer res.Body.Close()
	body := bufio.NewReader(res.Body)
	_, err = body.ReadString('\n')
	require.NoError(t, err)
	began := time.Now()
	r.cancel()
	rest, _ := io.ReadAll(body)
	assert.NotContains(t, string(rest), "[DONE]")
	assert.NoError(t, r.stop())
	assert.Less(t, time.Since(began), 8*time.Second)
	assert.Contains(t, r.log.String(), MsgDrainCut)
}

// A drain by POST does not end the process: what enters is answered by others.
func TestDrainByPost(t *testing.T) {
	t.Parallel()
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.GossipKey = testKey // so that what is forwarded goes over mutual TLS
	a := start(t, cfg, Options{})
	cfg.EngineURL = startSim(t, fast()).url()
	cfg.Join = []string{a.Addresses().Gossip}
	b := start(t, cfg, Options{})
	a.untilReady()
	b.untilReady()
	a.eventually(5*time.Second, "knowing the other", func() bool {
		p := a.table.Peer(b.boot)
		return p != nil && p.Fresh(time.Now())
	})
	code, body := a.get("/drained")
	assert.Equal(t, 200, code)
	assert.Equal(t, "not draining\n", body, "after two seconds without a drain")
	res, err := http.Post("http://"+a.Addresses().Status+"/drain", "", nil)
	require.NoError(t, err)
	res.Body.Close()
	assert.Equal(t, http.StatusAccepted, res.StatusCode)
	code, body = a.get("/drained")
	assert.Equal(t, 200, code)
	assert.Equal(t, "drained\n", body)
	code, body = a.get("/readyz?entry=1")
	assert.Equal(t, 200, code, body)
	code, _ = a.get("/readyz")
	assert.Equal(t, 503, code)
	before := b.proxy.Load().Accepted
	for range 5 {
		code, body = a.chat(chatBody)
		assert.Equal(t, 200, code, body)
	}
	assert.Equal(t, before+5, b.proxy.Load().Accepted, "the other one answered")
	b.eventually(2*time.Second, "news of the drain", func() bool {
		for _, p := range b.Status().Peers {
			if p.Node == a.Node() {
				return p.State == "draining"
			}
		}
		return false
	})
}

// A second engine life: down after three failed checks, warm again after it came back.
func TestEngineRestart(t *testing.T) {
	t.Parallel()
	e := startSim(t, fast())
	r := start(t, loopbackConfig(e.url()), Options{})
	r.untilReady()
	e.stop()
	down := time.Now()
	r.eventually(6*time.Second, "unreadiness", func() bool { ok, _ := r.Ready(); return !ok })
	assert.Greater(t, time.Since(down), time.Second, "one failed check must not be enough")
	code, body := r.get("/readyz")
	assert.Equal(t, 503, code)
	assert.Contains(t, body, "not ready: engine is not up: ")
	assert.Contains(t, r.log.String(), `level=WARN msg="engine stopped answering; not ready"`)
	e.start()
	r.untilReady()
	assert.Equal(t, 2, strings.Count(r.log.String(), `msg="warm-up request answered"`), "warmed up again")
}

// All goroutines end with Run.
func TestNoGoroutineIsLeft(t *testing.T) {
	before := ours()
	func() {
		e := startSim(t, fast())
		a := start(t, loopbackConfig(e.url()), Options{})
		cfg := loopbackConfig(e.url())
		cfg.Join = []string{a.Addresses().Gossip}
		b := start(t, cfg, Options{})
		a.untilReady()
		b.untilReady()
		for range 4 {
			code, _ := b.chat(chatBody)
			assert.Equal(t, 200, code)
		}
		assert.NoError(t, b.stop())
		assert.NoError(t, a.stop())
		e.stop()
	}()
	var left string
	for range 100 {
		if left = ours(); len(strings.Split(left, "\n\n")) <= len(strings.Split(before, "\n\n")) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	assert.Empty(t, left)
}

// ours returns the stacks of goroutines that this module or Serf started, without the tests' own.
func ours() string {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	var out []string
	for _, g := range strings.Split(string(buf), "\n\n") {
		if (strings.Contains(g, "grapevine-lb/grapevine") || strings.Contains(g, "hashicorp")) && !strings.Contains(g, "testing.tRunner") {
			out = append(out, g)
		}
	}
	return strings.Join(out, "\n\n")
}
