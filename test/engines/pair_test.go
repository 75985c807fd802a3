package engines

import (
	"fmt"
	"net/http"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// subject is an engine with its agent, and what is known of the engine beforehand.
type subject struct {
	*server
	agent   *harness.Agent
	agentIs string // the kind that the agent must find
	slots   int    // requests that it runs at once
	running string // its gauges
	waiting string
	tokens  string // its counter of generated tokens
	field   string // of its own in the model list
	// keeps: a request in its queue stays there when its client hangs up, until it gets a slot. llama.cpp looks whether
	// the client is there only after a second without a token for anybody; seen with plain closes and with resets.
	keeps bool
}

// readyAfterAnswer starts the engine under a running agent and watches: as long as the engine has not generated a token,
// the agent is not ready.
func (x *subject) readyAfterAnswer(t *testing.T) {
	t.Helper()
	code, why := x.agent.Readyz()
	require.Equal(t, http.StatusServiceUnavailable, code, "ready without an engine: %s", why)
	begin := time.Now()
	x.start()
	whys := map[string]bool{}
	for {
		x.alive()
		code, why := x.agent.Readyz()
		if code == http.StatusOK {
			break
		}
		if !whys[why] {
			whys[why] = true
			t.Logf("%s after %5.1f s: %.150s", x.kind, time.Since(begin).Seconds(), why)
		}
		require.Less(t, time.Since(begin), x.limit, "%s is not ready: %s", x.kind, why)
		time.Sleep(50 * time.Millisecond)
	}
	took := time.Since(begin)
	n, ok := gauge(t, x.url, x.tokens)
	assert.True(t, ok && n >= 1, "ready before the engine generated anything: %s %v", x.tokens, n)
	t.Logf("%s ready after %.1f s, %s %v", x.kind, took.Seconds(), x.tokens, n)
}

// detected checks what the agent found out by itself.
func (x *subject) detected(t *testing.T) {
	t.Helper()
	p := status(t, x.agent)
	assert.Equal(t, x.agentIs, p.Engine.Kind)
	assert.NotEmpty(t, p.Engine.Version)
	assert.NotEmpty(t, p.Engine.Evidence)
	assert.Equal(t, []string{x.model}, p.Engine.Models)
	t.Logf("%s: %s %s, because %s; serves %v", x.kind, p.Engine.Kind, p.Engine.Version, p.Engine.Evidence, p.Engine.Serves)
}

// settled waits until the readings are those numbers, on the agent and by what the engine itself prints, and then watches
// for two seconds that they stay.
func (x *subject) settled(t *testing.T, running, waiting int) {
	t.Helper()
	say := func() string {
		p := status(t, x.agent)
		r, w := p.reading("running"), p.reading("waiting")
		return fmt.Sprintf("running %s waiting %s", number(r.Value), number(w.Value))
	}
	want := fmt.Sprintf("running %d waiting %d", running, waiting)
	begin := time.Now()
	for say() != want {
		require.Less(t, time.Since(begin), 20*time.Second, "%s: %s, want %s; %s", x.kind, say(), want, x.printed(t))
		time.Sleep(50 * time.Millisecond)
	}
	took := time.Since(begin)
	for range 10 {
		time.Sleep(200 * time.Millisecond)
		require.Equal(t, want, say(), "%s, once settled; %s", x.kind, x.printed(t))
		require.Equal(t, fmt.Sprintf("%d %d", running, waiting), x.printed(t), "%s itself", x.kind)
	}
	t.Logf("%s: %-22s after %4d ms, the same for 2 s", x.kind, want, took.Milliseconds())
}

// printed is what the engine's page says now.
func (x *subject) printed(t *testing.T) string {
	r, _ := gauge(t, x.url, x.running)
	w, _ := gauge(t, x.url, x.waiting)
	return fmt.Sprintf("%v %v", r, w)
}

func number(v *float64) string {
	if v == nil {
		return "unknown"
	}
	return fmt.Sprint(*v)
}

// readings drives the engine from idle over busy to full and back, through the entry agent and around all agents.
func (x *subject) readings(t *testing.T, entry *harness.Agent) {
	t.Helper()
	x.settled(t, 0, 0)
	var all []*stream
	add := func(base string) *stream {
		s := open(t, base, x.model, 1800, true)
		all = append(all, s)
		return s
	}
	first := add(entry.URL)
	harness.Eventually(t, time.Minute, "the first token", first.begun)
	x.settled(t, 1, 0)
	for range x.slots - 1 {
		add(entry.URL)
	}
	x.settled(t, x.slots, 0)
	add(x.url) // around the agents
	x.settled(t, x.slots, 1)
	add(x.agent.URL)
	x.settled(t, x.slots, 2)

	p := status(t, x.agent)
	assert.Equal(t, 1, p.Engine.Outside, "requests that came around the agent")
	for _, name := range []string{"running", "waiting", "kv_usage", "kv_capacity_tokens", "generation_tokens"} {
		r := p.reading(name)
		if assert.NotNil(t, r.Value, "%s is unknown: %s", name, r.Why) && assert.NotNil(t, r.AgeMS, name) {
			assert.Less(t, *r.AgeMS, int64(3000), name)
			assert.NotEmpty(t, r.Page, name)
		}
	}
	assert.Greater(t, *p.reading("kv_usage").Value, 0.0)
	// The entry sees the same by gossip: the merged count, and not only what it sent itself.
	var seen string
	harness.Eventually(t, 5*time.Second, "the entry to see the whole load", func() bool {
		p := status(t, entry)
		for _, q := range p.Peers {
			if len(q.Models) == 1 && q.Models[0] == x.model && q.Running != nil && q.Waiting != nil {
				seen = fmt.Sprintf("%d %d", *q.Running, *q.Waiting)
			}
		}
		return seen == fmt.Sprintf("%d 2", x.slots)
	})
	for _, s := range all {
		require.False(t, s.over(), "an answer ended before the readings were compared: %v", s.err)
	}

	// Hanging up reaches the engine: first the one in its queue that came through an agent, then the one that has taken the
	// place of a running one.
	all[len(all)-1].cancel()
	if x.keeps {
		x.settled(t, x.slots, 2)
		all[x.slots-1].cancel()
		x.settled(t, x.slots, 1)
	} else {
		x.settled(t, x.slots, 1)
		all[x.slots-1].cancel()
		x.settled(t, x.slots, 0)
	}
	for _, s := range all[1:] {
		s.cancel()
	}
	x.settled(t, 1, 0)
	begin := time.Now()
	first.cancel()
	harness.Eventually(t, 10*time.Second, "the abort in the engine's own gauge", func() bool { return x.printed(t) == "0 0" })
	t.Logf("%s: abort of a stream in its own gauge after %d ms", x.kind, time.Since(begin).Milliseconds())
	x.settled(t, 0, 0)

	// The same without a stream. llama.cpp notices it only when nobody reads it more often than once a second.
	whole := open(t, entry.URL, x.model, 1800, false)
	x.settled(t, 1, 0)
	begin = time.Now()
	whole.cancel()
	for x.printed(t) != "0 0" {
		require.Less(t, time.Since(begin), 15*time.Second, "%s goes on with a request without a stream whose client is gone", x.kind)
		time.Sleep(2500 * time.Millisecond)
	}
	t.Logf("%s: abort of a request without a stream after at most %d ms", x.kind, time.Since(begin).Milliseconds())
}

// restarted kills the engine under its agent and starts it again.
func (x *subject) restarted(t *testing.T, entry *harness.Agent) {
	t.Helper()
	x.Kill()
	begin := time.Now()
	harness.Eventually(t, 10*time.Second, "the agent to notice the end of its engine", func() bool {
		code, _ := x.agent.Readyz()
		return code == http.StatusServiceUnavailable
	})
	t.Logf("%s: its end noticed after %d ms", x.kind, time.Since(begin).Milliseconds())
	code, body := post(t, entry.URL+"/v1/chat/completions", chat(x.model))
	assert.Equal(t, http.StatusServiceUnavailable, code, "a model that was there a moment ago is not unknown: %s", body)
	x.readyAfterAnswer(t)
	x.detected(t)
	x.settled(t, 0, 0)
	harness.Eventually(t, 10*time.Second, "an answer after the restart", func() bool {
		code, body = post(t, entry.URL+"/v1/chat/completions", chat(x.model))
		return code == http.StatusOK
	})
}

func chat(model string) map[string]any {
	return map[string]any{"model": model, "max_tokens": 4, "messages": []any{map[string]any{"role": "user", "content": "hello"}}}
}

// byName asks each agent for each model, and for one that nobody has.
func byName(t *testing.T, agents []*harness.Agent, subjects ...*subject) {
	t.Helper()
	var want []string
	for _, x := range subjects {
		want = append(want, x.model)
	}
	for _, a := range agents {
		harness.Eventually(t, 10*time.Second, a.Name+" to list all models", func() bool {
			ids, _ := modelIDs(t, a.URL)
			return assert.ObjectsAreEqual(len(want), len(ids))
		})
		ids, body := modelIDs(t, a.URL)
		assert.ElementsMatch(t, want, ids)
		for _, x := range subjects {
			if x.field != "" {
				assert.Contains(t, body, x.field, "the engine's own fields")
			}
			code, body := post(t, a.URL+"/v1/chat/completions", chat(x.model))
			assert.Equal(t, http.StatusOK, code, "%s for %s: %s", a.Name, x.model, body)
		}
		code, body := post(t, a.URL+"/v1/chat/completions", chat("nobody-has-this"))
		assert.Equal(t, http.StatusNotFound, code, "%s, although llama.cpp answers any name: %s", a.Name, body)
		assert.Contains(t, body, "model_not_found")
	}
}

// printStatus logs what `grapevine status` says.
func printStatus(t *testing.T, a *harness.Agent) string {
	t.Helper()
	out, err := exec.Command(harness.Build(t, "./cmd/grapevine"), "status", "-url", a.Status).CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("grapevine status -url %s\n%s", a.Status, out)
	return string(out)
}

func quit(t *testing.T, agents ...*harness.Agent) {
	t.Helper()
	for _, a := range agents {
		a.Signal(syscall.SIGTERM)
	}
	for _, a := range agents {
		assert.Equal(t, "exit 0", a.Wait(20*time.Second), a.Name)
		assert.NotContains(t, a.Log(), "panic:")
	}
}
