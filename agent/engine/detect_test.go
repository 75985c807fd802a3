package engine

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// from makes a page map out of captured files.
func from(t *testing.T, files map[string]string) map[string]page {
	pages := map[string]page{}
	for path, file := range files {
		pages[path] = captured(t, "pages/"+file)
	}
	return pages
}

func TestDetectByCapturedPages(t *testing.T) {
	for name, c := range map[string]struct {
		files    map[string]string
		kind     Kind
		version  string
		evidence string
	}{
		"vllm": {map[string]string{"/metrics": "vllm-0.32.0/metrics-idle.txt", "/v1/models": "vllm-0.32.0/get_v1_models.txt", "/version": "vllm-0.32.0/get_version.txt"},
			VLLM, "0.32.0", "/metrics has vllm: metrics"},
		"vllm V0": {map[string]string{"/metrics": "vllm-0.8.5-v0/metrics-idle.txt", "/version": "vllm-0.8.5-v0/get_version.txt"},
			VLLM, "0.8.5", "/metrics has vllm: metrics"},
		"vllm without metrics": {map[string]string{"/v1/models": "vllm-0.32.0/get_v1_models.txt"}, VLLM, "", "/v1/models is owned by vllm"},
		"simulator":            {map[string]string{"/metrics": "llm-d-sim-eec055a/metrics-idle.txt"}, VLLM, "", "/metrics has vllm: metrics"},
		"sglang":               {map[string]string{"/metrics": "sglang-0.5.23-constructed/metrics-idle.txt"}, SGLang, "", "/metrics has sglang: metrics"},
		"llamacpp":             {map[string]string{"/metrics": "llamacpp-b11434/metrics-idle.txt", "/props": "llamacpp-b11434/get_props.txt"}, LlamaCpp, "b0-unknown", "/metrics has llamacpp: metrics"},
		"llamacpp without":     {map[string]string{"/v1/models": "llamacpp-b11434/get_v1_models.txt"}, LlamaCpp, "", "Server: llama.cpp"},
		"lmdeploy":             {map[string]string{"/metrics": "lmdeploy-0.18.0-constructed/metrics-idle.txt"}, LMDeploy, "", "/metrics has lmdeploy: metrics"},
		"tgi":                  {map[string]string{"/metrics": "tgi-3.3.7-constructed/metrics-idle-fresh.txt"}, TGI, "", "/metrics has tgi_ metrics"},
		"tei":                  {map[string]string{"/metrics": "tei-constructed/metrics-busy.txt"}, TEI, "", "/metrics has te_ metrics"},
		"trtllm, fresh":        {map[string]string{"/metrics": "trtllm-serve-constructed/iteration-stats.json", "/prometheus/metrics": "trtllm-serve-constructed/metrics-fresh.txt"}, TRTLLM, "", "/prometheus/metrics has trtllm_ metrics"},
		"triton":               {map[string]string{"/metrics": "triton-trtllm-constructed/metrics-busy.txt"}, Triton, "", "/metrics has nv_inference_ metrics"},
		"nim":                  {map[string]string{"/v1/metrics": "nim-constructed/metrics-busy.txt"}, NIM, "", "/v1/metrics has num_requests_running metrics"},
		"nim with vllm inside": {map[string]string{"/v1/metrics": "vllm-0.32.0/metrics-busy.txt"}, NIM, "", "/v1/metrics has vllm: metrics"},
		"infinity":             {map[string]string{"/metrics": "infinity-0.0.78/metrics-idle.txt", "/v1/models": "infinity-0.0.78/get_v1_models.txt"}, Infinity, "", "/v1/models is owned by infinity"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, from(t, c.files))
			r := f.reader(t, Auto)
			assert.Equal(t, Auto, r.Kind())
			kind, err := r.Detect(t.Context())
			require.NoError(t, err)
			assert.Equal(t, c.kind, kind)
			assert.Equal(t, c.kind, r.Kind())
			assert.Equal(t, c.evidence, r.Evidence())
			assert.Equal(t, c.version, r.Version())
		})
	}
}

func TestDetectByOtherSigns(t *testing.T) {
	for name, c := range map[string]struct {
		pages map[string]page
		kind  Kind
	}{
		"ollama":      {map[string]page{"/": text("Ollama is running"), "/v1/models": text(`{"object":"list","data":null}`)}, Ollama},
		"ollama list": {map[string]page{"/v1/models": text(`{"data":[{"id":"x","owned_by":"library"}]}`)}, Ollama},
		"dynamo":      {map[string]page{"/metrics": text("# TYPE dynamo_frontend_queued_requests gauge\n")}, Dynamo},
		"triton":      {map[string]page{"/v2/health/ready": text("")}, Triton},
		"tgi":         {map[string]page{"/info": text(`{"model_id":"m","max_total_tokens":4096}`)}, TGI},
		"tei":         {map[string]page{"/info": text(`{"model_id":"m","model_type":{"embedding":{}},"max_input_length":512}`)}, TEI},
		"any other":   {map[string]page{"/metrics": text("up 1\n"), "/v1/models": text(`{"data":[{"id":"x"}]}`)}, OpenAI},
		"llama.cpp while loading": {map[string]page{"/metrics": {status: 503, header: http.Header{"Server": {"llama.cpp"}}, body: []byte(`{"error":{"message":"Loading model"}}`)},
			"/v1/models": status(503, "")}, LlamaCpp},
	} {
		t.Run(name, func(t *testing.T) {
			kind, err := newFake(t, c.pages).reader(t, Auto).Detect(t.Context())
			require.NoError(t, err)
			assert.Equal(t, c.kind, kind)
		})
	}
	f := newFake(t, map[string]page{"/v1/models": status(503, "not yet")})
	r := f.reader(t, Auto)
	_, err := r.Detect(t.Context())
	assert.EqualError(t, err, "detect engine: /v1/models answered 503: not yet")
	assert.Equal(t, Auto, r.Kind())
	rd, err := r.Read(t.Context())
	require.Error(t, err)
	assert.False(t, rd.Running.OK)
	assert.Contains(t, rd.Field(FieldRunning).Why, "not yet")
	assert.Equal(t, Loading, r.Health(t.Context()).State)
}

// An engine of another kind takes the port of the first one.
func TestAnotherEngineTakesTheAddress(t *testing.T) {
	f := newFake(t, from(t, map[string]string{"/metrics": "vllm-0.32.0/metrics-busy.txt"}))
	r := f.reader(t, Auto)
	_, err := r.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, VLLM, r.Kind())
	f.set("/metrics", captured(t, "pages/tgi-3.3.7-constructed/metrics-busy.txt"))
	r.mu.Lock()
	r.looked = r.looked.Add(-absentFor) // a look is allowed again
	r.mu.Unlock()
	for range 3 {
		rd, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.False(t, rd.Running.OK, "the other engine's page must not be half understood")
	}
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, TGI, r.Kind())
	assert.Equal(t, 14, rd.Running.V)
}

func TestConfigIsChecked(t *testing.T) {
	u := parseURL(t, "http://127.0.0.1:8000")
	for want, cfg := range map[string]Config{
		"engine url: missing": {},
		`engine url "ftp://x": scheme must be http, https or unix`:                            {URL: parseURL(t, "ftp://x")},
		`engine url "http:///x": no host`:                                                     {URL: parseURL(t, "http:///x")},
		`engine url "unix:": no path to a socket, as in unix:///run/engine.sock`:              {URL: parseURL(t, "unix:")},
		`engine kind "vlm": want one of ` + kindList():                                        {URL: u, Kind: "vlm"},
		`engine metrics url "metrics": want http(s)://..., a path such as /metrics, or "off"`: {URL: u, MetricsURL: "metrics"},
		`engine metrics: entry 1, "x": want "field = expression"`:                             {URL: u, Mapping: "x"},
	} {
		assert.EqualError(t, cfg.Validate(), want)
		r := New(cfg)
		_, err := r.Read(t.Context())
		assert.EqualError(t, err, want, "a Reader that was made anyway says so")
		assert.Equal(t, Down, r.Health(t.Context()).State)
	}
	assert.NoError(t, Config{URL: u}.Validate())
}
