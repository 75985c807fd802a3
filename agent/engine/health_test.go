package engine

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestHealthPerEngine(t *testing.T) {
	loadingBody := `{"error":{"message":"Loading model","type":"unavailable_error","code":503}}`
	for name, c := range map[string]struct {
		kind  Kind
		pages map[string]page
		first HealthState // before it was ever healthy
		later HealthState // after it was
	}{
		"vllm":                  {VLLM, map[string]page{"/health": text("")}, Healthy, Healthy},
		"vllm, engine died":     {VLLM, map[string]page{"/health": status(503, "")}, Down, Down},
		"sglang, cheap page":    {SGLang, map[string]page{"/ready": text(""), "/health": status(503, "never asked")}, Healthy, Healthy},
		"sglang, older":         {SGLang, map[string]page{"/health": text("")}, Healthy, Healthy},
		"sglang, 503":           {SGLang, map[string]page{"/health": status(503, "")}, Loading, Draining},
		"sglang, ready is 503":  {SGLang, map[string]page{"/ready": status(503, ""), "/health": text("")}, Loading, Draining},
		"llamacpp":              {LlamaCpp, map[string]page{"/health": text(`{"status":"ok"}`)}, Healthy, Healthy},
		"llamacpp, loading":     {LlamaCpp, map[string]page{"/health": status(503, loadingBody)}, Loading, Loading},
		"llamacpp, broken":      {LlamaCpp, map[string]page{"/health": status(500, "")}, Down, Down},
		"lmdeploy":              {LMDeploy, map[string]page{"/health": text(`{"status":"alive"}`)}, Healthy, Healthy},
		"lmdeploy, sleeping":    {LMDeploy, map[string]page{"/health": text(`{"status": "sleeping"}`)}, Asleep, Asleep},
		"lmdeploy, broken":      {LMDeploy, map[string]page{"/health": status(503, "")}, Down, Down},
		"tgi, broken":           {TGI, map[string]page{"/health": status(503, "unhealthy")}, Down, Down},
		"tei":                   {TEI, map[string]page{"/health": text("")}, Healthy, Healthy},
		"trtllm":                {TRTLLM, map[string]page{"/health": text("")}, Healthy, Healthy},
		"triton, not ready":     {Triton, map[string]page{"/v2/health/ready": status(400, "")}, Loading, Down},
		"nim, not ready":        {NIM, map[string]page{"/v1/health/ready": status(503, "")}, Loading, Down},
		"dynamo without models": {Dynamo, map[string]page{"/health": text(""), "/v1/models": text(`{"data":[]}`)}, Loading, Draining},
		"dynamo":                {Dynamo, map[string]page{"/v1/models": text(`{"data":[{"id":"m"}]}`)}, Healthy, Healthy},
		"infinity":              {Infinity, map[string]page{"/health": text(`{"unix":1}`)}, Healthy, Healthy},
		"ollama":                {Ollama, map[string]page{"/": text("Ollama is running")}, Healthy, Healthy},
		"other":                 {OpenAI, map[string]page{"/v1/models": text(`{"data":[]}`)}, Healthy, Healthy},
		"no such page":          {VLLM, nil, Down, Down},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, c.pages)
			r := f.reader(t, c.kind)
			h := r.Health(t.Context())
			assert.Equal(t, c.first, h.State, h.Detail)
			assert.NotEmpty(t, h.Detail)
			r.health.healthy = true
			assert.Equal(t, c.later, r.Health(t.Context()).State)
		})
	}
}

func TestHealthOfEveryTable(t *testing.T) {
	for _, table := range tables {
		assert.NotEmpty(t, table.Health, table.Kind)
		assert.NotEmpty(t, table.WarmUp, table.Kind)
	}
}

// A probe that was made for the engine and goes through the agent must ask the page that the engine has.
func TestHealthPath(t *testing.T) {
	f := newFake(t, map[string]page{"/ready": text("")})
	r := f.reader(t, SGLang)
	assert.Equal(t, "/ready", r.HealthPath(), "the first of its table")
	f.set("/ready", status(404, ""))
	f.set("/health", text(""))
	assert.Equal(t, Healthy, r.Health(t.Context()).State)
	assert.Equal(t, "/health", r.HealthPath(), "an older one has no /ready")
	assert.Equal(t, "/", f.reader(t, Ollama).HealthPath())
	assert.Equal(t, "/health", New(Config{URL: parseURL(t, "http://127.0.0.1:1")}).HealthPath(), "not known yet")
}

func TestHealthMetricsSayAsleep(t *testing.T) {
	f := newFake(t, map[string]page{
		"/health":  text(""),
		"/metrics": text("vllm:engine_sleep_state{sleep_state=\"awake\"} 0\nvllm:engine_sleep_state{sleep_state=\"discard_all\"} 1\n"),
	})
	r := f.reader(t, VLLM)
	assert.Equal(t, Healthy, r.Health(t.Context()).State)
	_, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Asleep, r.Health(t.Context()).State)
	f.set("/metrics", captured(t, "pages/vllm-0.32.0/metrics-idle.txt"))
	_, err = r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Healthy, r.Health(t.Context()).State, "woken")
}

func TestSlowIsNotDown(t *testing.T) {
	release := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	defer s.Close()
	defer close(release)
	r := New(Config{URL: parseURL(t, s.URL), Kind: VLLM, Timeout: 30 * time.Millisecond})
	h := r.Health(t.Context())
	assert.Equal(t, Unresponsive, h.State, h.Detail)
	rd, err := r.Read(t.Context())
	require.ErrorIs(t, err, ErrTimeout)
	assert.True(t, rd.Stale)
	assert.True(t, rd.TimedOut)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = New(Config{URL: parseURL(t, s.URL), Kind: VLLM}).Read(ctx)
	require.ErrorIs(t, err, ErrTimeout, "the caller's deadline is a timeout too")
}

// SGLang's /health generates a token when it idles; the agent allows it one second.
func TestSlowHealthPageWithAFreshReading(t *testing.T) {
	f := newFake(t, from(t, map[string]string{"/v1/loads": "sglang-0.5.23-constructed/loads.json"}))
	inner := f.Config.Handler
	f.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			<-r.Context().Done()
			return
		}
		inner.ServeHTTP(w, r)
	})
	r := f.reader(t, SGLang)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	assert.Equal(t, Unresponsive, r.Health(ctx).State, "nothing else is known")
	_, err := r.Read(t.Context())
	require.NoError(t, err)
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	h := r.Health(ctx)
	assert.Equal(t, Healthy, h.State, h.Detail)
}

func TestRefusedIsDownAndForgetsOldValues(t *testing.T) {
	f := newFake(t, from(t, map[string]string{"/metrics": "llamacpp-b11434/metrics-busy.txt", "/slots": "llamacpp-b11434/load-busy.txt"}))
	r := f.reader(t, LlamaCpp)
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, rd.Running.V)
	require.Equal(t, 4096, rd.KVCapacity.V)
	f.CloseClientConnections()
	f.Close()
	rd, err = r.Read(t.Context())
	require.ErrorIs(t, err, ErrRefused)
	assert.False(t, rd.TimedOut)
	assert.False(t, rd.Running.OK)
	assert.Contains(t, rd.Field(FieldRunning).Why, "connection refused")
	assert.False(t, rd.KVCapacity.OK, "nor what another page said")
	h := r.Health(t.Context())
	assert.Equal(t, Down, h.State)
	assert.Contains(t, h.Detail, "connection refused")
}

func TestUnixSocket(t *testing.T) {
	path := t.TempDir() + "/engine.sock"
	_, err := New(Config{URL: parseURL(t, "unix://"+path), Kind: VLLM}).Read(t.Context())
	require.ErrorIs(t, err, ErrRefused, "no socket yet is an engine that has not started")

	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	f := &fakeEngine{pages: from(t, map[string]string{"/metrics": "vllm-0.32.0/metrics-busy.txt", "/health": "vllm-0.32.0/get_health.txt"})}
	f.Server = &httptest.Server{Listener: l, Config: &http.Server{Handler: f}}
	f.Start()
	defer f.Close()
	r := New(Config{URL: parseURL(t, "unix://"+path)})
	defer r.Close()
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, VLLM, r.Kind())
	assert.Equal(t, 3, rd.Running.V)
	assert.Equal(t, Healthy, r.Health(t.Context()).State)
}
