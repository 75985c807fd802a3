package engine

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// inMemory is a client whose engine is a function; it works inside synctest.
type inMemory func(r *http.Request) (*http.Response, error)

func (f inMemory) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestValuesAgeAndExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := false
		client := &http.Client{Transport: inMemory(func(r *http.Request) (*http.Response, error) {
			if hang {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			f := &fakeEngine{pages: map[string]page{"/metrics": text("vllm:num_requests_running 4\n")}}
			return recorded(f, r), nil
		})}
		r := New(Config{URL: parseURL(t, "http://engine"), Kind: VLLM, Client: client})
		first, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, routing.Some(4), first.Running)
		assert.False(t, first.Stale)
		assert.Equal(t, 200*time.Millisecond, first.Interval())

		hang = true
		var rd Reading
		for range 4 {
			rd, err = r.Read(t.Context())
			require.ErrorIs(t, err, ErrTimeout)
			assert.Equal(t, routing.Some(4), rd.Running, "in use while it ages")
			assert.Equal(t, first.At, rd.At)
			assert.True(t, rd.Stale && rd.TimedOut)
		}
		rd, _ = r.Read(t.Context())
		assert.False(t, rd.Running.OK, "10 s old")
		assert.Equal(t, "older than 10s", rd.Field(FieldRunning).Why)
		assert.Equal(t, 2*time.Second, rd.Interval(), "a slow page is read less often")

		hang = false
		rd, err = r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, routing.Some(4), rd.Running)
		assert.False(t, rd.Stale)
	})
}

// recorded serves a request without a network.
func recorded(h http.Handler, r *http.Request) *http.Response {
	w := &memoryWriter{header: http.Header{}, status: 200}
	if r.Body == nil {
		r.Body = http.NoBody
	}
	h.ServeHTTP(w, r)
	return &http.Response{StatusCode: w.status, Header: w.header, ProtoMajor: 1, ProtoMinor: 1,
		ContentLength: int64(w.body.Len()), Body: readCloser{strings.NewReader(w.body.String())}, Request: r}
}

type memoryWriter struct {
	header http.Header
	status int
	body   strings.Builder
}

func (w *memoryWriter) Header() http.Header         { return w.header }
func (w *memoryWriter) WriteHeader(s int)           { w.status = s }
func (w *memoryWriter) Write(b []byte) (int, error) { return w.body.Write(b) }

type readCloser struct{ *strings.Reader }

func (readCloser) Close() error { return nil }

// The cheap page each time, the large one every 5 s, an absent one every 30 s.
func TestPagesAreFetchedAtTheirOwnPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeEngine{pages: map[string]page{
			"/v1/loads": captured(t, "pages/sglang-0.5.23-constructed/loads.json"),
			"/metrics":  captured(t, "pages/sglang-0.5.23-constructed/metrics-busy.txt"),
		}}
		client := &http.Client{Transport: inMemory(func(r *http.Request) (*http.Response, error) { return recorded(f, r), nil })}
		r := New(Config{URL: parseURL(t, "http://engine"), Kind: SGLang, Client: client})
		for range 100 {
			rd, err := r.Read(t.Context())
			require.NoError(t, err)
			require.Equal(t, routing.Some(23), rd.Running)
			require.True(t, rd.ProcessStart.OK, "from the slow page, still fresh enough")
			time.Sleep(200 * time.Millisecond)
		}
		calls := map[string]int{}
		for _, c := range f.asked() {
			calls[c]++
		}
		assert.Equal(t, map[string]int{"GET /v1/loads": 100, "GET /metrics": 4, "GET /get_load": 1}, calls)

		f.pages["/v1/loads"] = status(404, "") // downgraded under a running agent
		rd, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, "/metrics", rd.Field(FieldRunning).Page)
		time.Sleep(200 * time.Millisecond)
		f.asked()
		_, err = r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, []string{"GET /metrics"}, f.asked(), "now the page of every read")
	})
}

func TestOlderSGLangPage(t *testing.T) {
	f := newFake(t, map[string]page{"/get_load": text(`[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2},{"dp_rank":1,"num_reqs":3,"num_waiting_reqs":0}]`)})
	rd, err := f.reader(t, SGLang).Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, routing.Some(6), rd.Running)
	assert.Equal(t, routing.Some(2), rd.Waiting)
}

func TestCounterResets(t *testing.T) {
	assert.Equal(t, routing.Some(3.0), Increase(routing.Some(4.0), routing.Some(7.0)))
	assert.Equal(t, routing.Some(7.0), Increase(routing.Some(9.0), routing.Some(7.0)), "counted from zero again")
	assert.False(t, Increase(routing.Opt[float64]{}, routing.Some(7.0)).OK)

	f := newFake(t, nil)
	f.pages = map[string]page{}
	r := f.reader(t, VLLM)
	for _, step := range []struct {
		page   string
		resets int
	}{
		{"vllm:generation_tokens_total 10\nprocess_start_time_seconds 5\n", 0},
		{"vllm:generation_tokens_total 30\nprocess_start_time_seconds 5\n", 0},
		{"vllm:num_requests_running 0\n", 0},
		{"vllm:generation_tokens_total 20\n", 1},
		{"vllm:generation_tokens_total 25\n", 1},
		{"vllm:generation_tokens_total 25\nprocess_start_time_seconds 9\n", 2},
	} {
		f.set("/metrics", text(step.page))
		rd, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, step.resets, rd.Resets, step.page)
	}
}

func TestPagesAreBounded(t *testing.T) {
	f := newFake(t, map[string]page{"/metrics": text(strings.Repeat("# filler\n", 2000) + "vllm:num_requests_running 1\n")})
	r := New(Config{URL: f.url(t), Kind: VLLM, MaxBytes: 4096})
	defer r.Close()
	rd, err := r.Read(t.Context())
	require.ErrorIs(t, err, ErrTooLarge)
	assert.False(t, rd.Running.OK)
}

func TestAbsentMetricsSayWhatToDo(t *testing.T) {
	f := newFake(t, map[string]page{"/metrics": status(501, `{"error":{"code":501,"message":"This server does not support metrics endpoint. Start it with `+"`--metrics`"+`","type":"not_supported_error"}}`)})
	r := f.reader(t, LlamaCpp)
	rd, err := r.Read(t.Context())
	require.Error(t, err)
	assert.Contains(t, rd.Field(FieldWaiting).Why, "start llama-server with --metrics")
	rd, err = r.Read(t.Context())
	require.Error(t, err)
	assert.True(t, rd.Stale)
	assert.Equal(t, []string{"GET /metrics", "GET /props", "GET /slots"}, f.asked(), "an absent page is not asked for again at once")
}

func TestMetricsElsewhere(t *testing.T) {
	other := newFake(t, map[string]page{"/m": text("vllm:num_requests_running 6\n")})
	f := newFake(t, map[string]page{"/other": text("vllm:num_requests_running 2\n")})
	for where, want := range map[string]int{other.URL + "/m": 6, "/other": 2} {
		r := New(Config{URL: f.url(t), MetricsURL: where})
		rd, err := r.Read(t.Context())
		require.NoError(t, err, where)
		assert.Equal(t, routing.Some(want), rd.Running)
		r.Close()
	}
}

func TestAdaptersFollowThePage(t *testing.T) {
	const line = "vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"%\",waiting_lora_adapters=\"\"} 1\n"
	f := newFake(t, map[string]page{"/metrics": text(strings.Replace(line, "%", "b, a,b", 1))})
	r := f.reader(t, VLLM)
	for adapters, want := range map[string][]string{"b, a,b": {"a", "b"}, "c": {"c"}, "": {}} {
		f.set("/metrics", text(strings.Replace(line, "%", adapters, 1)))
		rd, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, want, rd.Adapters.Running)
		assert.Equal(t, routing.Some(2), rd.Adapters.Max)
	}
	f.set("/metrics", text("vllm:num_requests_running 1\n"))
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.False(t, rd.Adapters.Known)
}

func TestReaderIsSafeForConcurrentUse(t *testing.T) {
	f := newFake(t, map[string]page{
		"/metrics": captured(t, "pages/vllm-0.32.0/metrics-busy.txt"), "/health": text(""),
		"/v1/models": captured(t, "pages/vllm-0.32.0/get_v1_models.txt"), "/version": text(`{"version":"1"}`),
	})
	r := f.reader(t, Auto)
	var wg sync.WaitGroup
	for _, do := range []func(){
		func() { _, _ = r.Read(t.Context()) }, func() { _ = r.Health(t.Context()) }, func() { _, _ = r.Models(t.Context()) },
		func() { _, _ = r.Detect(t.Context()) }, func() { _ = r.Last(); _ = r.Kind(); _ = r.Abilities(); _ = r.Problems() },
	} {
		wg.Go(func() {
			for range 20 {
				do()
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 3, r.Last().Running.V)
}
