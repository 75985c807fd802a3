package engines

import (
	"net/http"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func llama(t *testing.T, s *harness.Stage, n int) *subject {
	t.Helper()
	return &subject{server: newServer(t, s, n, "llamacpp", "gemma", time.Minute), agentIs: "llamacpp", slots: 2,
		running: "llamacpp:requests_processing", waiting: "llamacpp:requests_deferred", tokens: "llamacpp:tokens_predicted_total",
		field: `"n_ctx":2048`, keeps: true}
}

func vllm(t *testing.T, s *harness.Stage, n int) *subject {
	t.Helper()
	return &subject{server: newServer(t, s, n, "vllm", "tiny", 8*time.Minute), agentIs: "vllm", slots: 2,
		running: "vllm:num_requests_running", waiting: "vllm:num_requests_waiting", tokens: "vllm:generation_tokens_total",
		field: `"max_model_len":2048`}
}

// agent starts an agent that holds nothing back, so that what the engine's queue should have can be told beforehand.
func agent(t *testing.T, s *harness.Stage, n int, engine string) *harness.Agent {
	t.Helper()
	a := s.Agent(n, engine, harness.Env{"GRAPEVINE_GATE": "off"})
	harness.Eventually(t, 20*time.Second, a.Name+" to answer", func() bool {
		code, _ := harness.Get(a.Status + "/livez")
		return code == http.StatusOK
	})
	return a
}

// llama.cpp and a simulated vLLM, each behind an agent.
func TestLlamaCpp(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(2)
	x := llama(t, s, 1)
	fake := s.FakeEngine(2)
	x.agent = agent(t, s, 1, x.url)
	other := agent(t, s, 2, fake.URL)
	other.WaitReady(20 * time.Second)
	x.readyAfterAnswer(t)
	other.WaitMembers(2, 20*time.Second)
	x.detected(t)
	y := &subject{server: &server{model: harness.FakeModel}}
	byName(t, []*harness.Agent{x.agent, other}, x, y)
	x.readings(t, other)
	out := printStatus(t, x.agent)
	assert.Contains(t, out, "llamacpp:requests_processing")
	assert.Contains(t, out, "unknown")
	x.restarted(t, other)
	quit(t, x.agent, other)
}

// Another engine of another kind and with another model comes up where the first one was.
func TestEngineReplaced(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(1)
	x := llama(t, s, 1)
	x.agent = agent(t, s, 1, x.url)
	x.readyAfterAnswer(t)
	x.detected(t)
	x.Kill()
	fake := s.FakeEngine(1, "-model", "next")
	harness.Eventually(t, 30*time.Second, "the agent to find the other engine", func() bool {
		p := status(t, x.agent)
		return p.Ready && p.Engine.Kind == "vllm" && len(p.Engine.Models) == 1 && p.Engine.Models[0] == "next"
	})
	code, body := post(t, x.agent.URL+"/v1/chat/completions", chat("next"))
	assert.Equal(t, http.StatusOK, code, body)
	code, body = post(t, x.agent.URL+"/v1/chat/completions", chat(x.model))
	assert.Equal(t, http.StatusServiceUnavailable, code, "gone for less than ten minutes: %s", body)
	require.True(t, fake.Alive())
	quit(t, x.agent)
}

// A llama.cpp that sleeps when idle is left asleep by its agent, and woken by a request.
func TestLlamaCppSleeps(t *testing.T) {
	s := harness.New(t).Size(1)
	x := llama(t, s, 1)
	x.args = []string{"--sleep-idle-seconds", "2"}
	x.agent = agent(t, s, 1, x.url)
	x.readyAfterAnswer(t)
	asleep := func() bool { r := x.asleep(t); return r != nil && *r == 1 }
	harness.Eventually(t, 30*time.Second, "the engine to fall asleep", asleep)
	for range 20 {
		time.Sleep(200 * time.Millisecond)
		require.True(t, asleep(), "something woke it")
	}
	code, why := x.agent.Readyz()
	assert.Equal(t, http.StatusOK, code, "it takes requests: %s", why)
	code, body := post(t, x.agent.URL+"/v1/chat/completions", chat(x.model))
	assert.Equal(t, http.StatusOK, code, body)
	quit(t, x.agent)
}

func (x *subject) asleep(t *testing.T) *float64 {
	p := status(t, x.agent)
	return p.reading("asleep").Value
}

// vLLM V1 on the CPU and llama.cpp, an agent in front of each, both serving both models by name.
func TestVLLMAndLlamaCpp(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(2)
	x, y := llama(t, s, 1), vllm(t, s, 2)
	x.agent, y.agent = agent(t, s, 1, x.url), agent(t, s, 2, y.url)
	x.readyAfterAnswer(t)
	y.readyAfterAnswer(t)
	x.agent.WaitMembers(2, 20*time.Second)
	x.detected(t)
	y.detected(t)
	byName(t, []*harness.Agent{x.agent, y.agent}, x, y)
	x.readings(t, y.agent)
	y.readings(t, x.agent)
	for _, a := range []*harness.Agent{x.agent, y.agent} {
		printStatus(t, a)
	}
	x.restarted(t, y.agent)
	y.restarted(t, x.agent)
	quit(t, x.agent, y.agent)
}

// Infinity embeds: chats are not sent to it, and its queue is read from its model list.
func TestInfinity(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(2)
	e := newServer(t, s, 1, "infinity", "minilm", 4*time.Minute)
	fake := s.FakeEngine(2)
	a, other := agent(t, s, 1, e.url), agent(t, s, 2, fake.URL)
	e.start()
	a.WaitReady(e.limit)
	other.WaitReady(20 * time.Second)
	p := status(t, a)
	assert.Equal(t, "infinity", p.Engine.Kind)
	assert.Contains(t, p.Engine.Serves, "embeddings")
	assert.NotContains(t, p.Engine.Serves, "chat")
	waiting := p.reading("waiting")
	assert.NotNil(t, waiting.Value, waiting.Why)
	t.Logf("infinity %s, because %s; waiting from %s %s", p.Engine.Version, p.Engine.Evidence, waiting.Page, waiting.Metric)
	harness.Eventually(t, 20*time.Second, "the other agent to know the model", func() bool {
		ids, _ := modelIDs(t, other.URL)
		return len(ids) == 2
	})
	for _, entry := range []*harness.Agent{a, other} {
		code, body := post(t, entry.URL+"/v1/embeddings", map[string]any{"model": "minilm", "input": "a vine"})
		assert.Equal(t, http.StatusOK, code, body)
		assert.Contains(t, body, `"embedding"`)
		code, body = post(t, entry.URL+"/v1/chat/completions", chat("minilm"))
		assert.Equal(t, http.StatusNotFound, code, "no replica of this model chats: %s", body)
		code, body = post(t, entry.URL+"/v1/embeddings", map[string]any{"model": "another", "input": "a vine"})
		assert.Equal(t, http.StatusNotFound, code, "Infinity itself answers any name: %s", body)
	}
	printStatus(t, a)
	quit(t, a, other)
}

// Dynamo's frontend with its mock worker.
func TestDynamo(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(2)
	installed(t, "vllm") // its model
	e := newServer(t, s, 1, "dynamo", "tiny", 3*time.Minute)
	fake := s.FakeEngine(2)
	a, other := agent(t, s, 1, e.url), agent(t, s, 2, fake.URL)
	e.start()
	a.WaitReady(e.limit)
	other.WaitReady(20 * time.Second)
	p := status(t, a)
	assert.Equal(t, "dynamo", p.Engine.Kind)
	assert.Equal(t, []string{"tiny"}, p.Engine.Models)
	harness.Eventually(t, 20*time.Second, "the other agent to know the model", func() bool {
		ids, _ := modelIDs(t, other.URL)
		return len(ids) == 2
	})
	code, body := post(t, other.URL+"/v1/chat/completions", chat("tiny"))
	assert.Equal(t, http.StatusOK, code, body)
	one, two := open(t, other.URL, "tiny", 1500, true), open(t, a.URL, "tiny", 1500, true)
	running := func(n float64) func() bool {
		return func() bool { p := status(t, a); r := p.reading("running").Value; return r != nil && *r == n }
	}
	harness.Eventually(t, 20*time.Second, "two running in the reading", running(2))
	one.cancel()
	two.cancel()
	harness.Eventually(t, 20*time.Second, "both aborted in the reading", running(0))
	printStatus(t, a)
	quit(t, a, other)
}
