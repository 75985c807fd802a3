package agent

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// The larger of what the agent counts and what the engine prints is believed, and unknown is not zero.
func TestReportMergesCountsAndReadings(t *testing.T) {
	some := routing.Some[int]
	none := routing.Opt[int]{}
	for name, c := range map[string]struct {
		atReading, now   proxy.Load
		reading          engine.Reading
		running, waiting routing.Opt[int]
	}{
		"nothing known of the engine": {now: proxy.Load{Running: 2, Waiting: 1}, running: some(3), waiting: none},
		"the page lags behind": {atReading: proxy.Load{Running: 3}, now: proxy.Load{Running: 5},
			reading: engine.Reading{Running: some(1), Waiting: some(0)}, running: some(5), waiting: some(0)},
		"traffic goes around the agent": {atReading: proxy.Load{Running: 1}, now: proxy.Load{Running: 1},
			reading: engine.Reading{Running: some(4), Waiting: some(2)}, running: some(5 - 1), waiting: some(2)},
		"one of ours ended since": {atReading: proxy.Load{Running: 2}, now: proxy.Load{Running: 1},
			reading: engine.Reading{Running: some(3), Waiting: some(0)}, running: some(2), waiting: some(0)},
		"more than it runs at once": {now: proxy.Load{Running: 2, Waiting: 3},
			reading: engine.Reading{Running: some(0), Waiting: some(0), RunLimit: some(4)}, running: some(4), waiting: some(1)},
		"the page has no queue": {now: proxy.Load{Running: 2},
			reading: engine.Reading{Running: some(3)}, running: some(5), waiting: none},
	} {
		o := own{changed: make(chan struct{}, 1)}
		o.setReading(c.reading, nil, c.atReading, false)
		r := o.report(c.now, 1, time.Now())
		assert.Equal(t, c.running, r.Running, name)
		assert.Equal(t, c.waiting, r.Waiting, name)
		assert.False(t, r.KVUsed.OK, name)
		assert.False(t, r.GPUMemoryUsed.OK, name)
	}

	o := own{changed: make(chan struct{}, 1)}
	for range 3 {
		assert.False(t, o.is().stale)
		o.setReading(engine.Reading{}, errors.New("no answer in time"), proxy.Load{}, false)
	}
	assert.True(t, o.is().stale, "shown after three readings in a row that failed")
	o.setReading(engine.Reading{}, nil, proxy.Load{}, false)
	assert.False(t, o.is().stale)
}

// Who slept needs a warm-up, also where only the metrics page told of it.
func TestSleepEndsWarmth(t *testing.T) {
	o := own{changed: make(chan struct{}, 1), facts: facts{engineUp: true, warm: true, announced: true}}
	o.setReading(engine.Reading{Asleep: routing.Some(true)}, nil, proxy.Load{}, true)
	assert.True(t, o.facts.warm, "a request wakes it")
	o.setReading(engine.Reading{Asleep: routing.Some(true)}, nil, proxy.Load{}, false)
	o.setReading(engine.Reading{Asleep: routing.Some(false)}, nil, proxy.Load{}, false)
	assert.False(t, o.facts.warm)
	assert.False(t, o.facts.announced)
}

// sleeper is a vLLM that can be put to sleep.
type sleeper struct{ asleep, answers atomic.Int32 }

func (s *sleeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/health":
	case "/version":
		fmt.Fprint(w, `{"version":"0.32.0"}`)
	case "/metrics":
		awake, weights := 1-s.asleep.Load(), s.asleep.Load()
		fmt.Fprintf(w, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:engine_sleep_state{sleep_state=\"awake\"} %d\nvllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} %d\n", awake, weights)
	case "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}`)
	case "/v1/chat/completions":
		s.answers.Add(1)
		fmt.Fprint(w, `{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
	default:
		http.NotFound(w, r)
	}
}

// An engine that sleeps takes no requests and is not woken by a probe; when it wakes it is warmed up before it is ready.
func TestEngineSleepsAndWakes(t *testing.T) {
	t.Parallel()
	var e sleeper
	s := httptest.NewServer(&e)
	defer s.Close()
	a := start(t, loopbackConfig(s.URL), Options{})
	a.untilReady()
	assert.EqualValues(t, 1, e.answers.Load(), "the warm-up")

	e.asleep.Store(1)
	a.eventually(5*time.Second, "sleep", func() bool { return a.Status().State == "asleep" })
	code, why := a.get("/readyz")
	assert.Equal(t, 503, code)
	assert.Contains(t, why, "asleep")
	assert.True(t, a.Status().Engine.Asleep)
	code, body := a.chat(`{"model":"m","messages":[{"role":"user","content":"hello"}]}`)
	assert.Equal(t, 503, code, body)
	time.Sleep(500 * time.Millisecond)
	assert.EqualValues(t, 1, e.answers.Load(), "it was asked in its sleep")

	e.asleep.Store(0)
	a.untilReady()
	assert.EqualValues(t, 2, e.answers.Load(), "the warm-up after its sleep")
	code, body = a.chat(`{"model":"m","messages":[{"role":"user","content":"hello"}]}`)
	assert.Equal(t, 200, code, body)
}
