package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// testConsole is a console of an agent with two replicas, the second unknown in most.
func testConsole() *console {
	page := func(code int, body string) func(context.Context) (*http.Response, error) {
		return func(context.Context) (*http.Response, error) {
			return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"text/x-engine"}}, Body: io.NopCloser(strings.NewReader(body))}, nil
		}
	}
	return &console{
		flight: new(flight),
		status: func() Status {
			return Status{Node: "a.1<script>", State: "ready", Ready: true, Warnings: []string{"running <without> a key"},
				Peers: []PeerStatus{{Node: "a.1", Self: true, State: "ready", KVUsage: routing.Some(0.5), Running: routing.Some(3)}, {Node: "b.2", State: "unknown"}}}
		},
		metrics: func(g *gathering) { g.add(MetricReady, 1); g.add(MetricState, 1, "ready") },
		alive:   func() error { return nil },
		ready:   func(entry bool) (bool, string) { return entry, "engine is not up" },
		picks:   func(id string) any { return []string{id} },
		explain: func(target string, h http.Header, body []byte) any { return target + " " + string(body) },
		drain:   func() bool { return true },
		drained: func(context.Context) string { return "not draining" },
		health:  page(503, "sleeping"),
		scrape:  page(200, "vllm:num_requests_running 1\n"),
		token:   "s3cret",
		every:   time.Second,
	}
}

func TestConsolePaths(t *testing.T) {
	h := testConsole().handler()
	local := map[string]string{}
	for _, row := range []struct {
		method, path string
		header       map[string]string
		remote, host string // default: another machine
		code         int
		body         string // part of it
		kind         string // content type begins with
	}{
		{method: "GET", path: "/", code: 200, body: "<th scope=\"row\">b.2", kind: "text/html"},
		{method: "GET", path: "/", code: 200, body: "a.1&lt;script&gt;", kind: "text/html"},
		{method: "GET", path: "/", code: 200, body: "<li>running &lt;without&gt; a key</li>", kind: "text/html"},
		{method: "GET", path: "/page/page.css", code: 200, body: "prefers-color-scheme", kind: "text/css"},
		{method: "GET", path: "/page/page.js", code: 200, body: "EventSource", kind: "text/javascript"},
		{method: "GET", path: "/nothing", code: 404},
		{method: "GET", path: "/status", code: 200, body: `"kv_usage": 0.5`, kind: "application/json"},
		{method: "GET", path: "/status", code: 200, body: `"kv_usage": null`, kind: "application/json"},
		{method: "GET", path: "/explain?model=m&tokens=5", code: 200, body: "/explain?model=m\\u0026tokens=5"},
		{method: "GET", path: "/explain?tokens=many", code: 400, body: "whole number"},
		{method: "POST", path: "/explain", code: 403, body: "GRAPEVINE_STATUS_TOKEN"},
		{method: "POST", path: "/explain?path=x", header: map[string]string{"Authorization": "Bearer s3cret"}, code: 400, body: "must begin with /"},
		{method: "POST", path: "/explain", header: map[string]string{"Authorization": "Bearer s3cret"}, code: 200, body: "/v1/chat/completions"},
		{method: "GET", path: "/livez", code: 200, body: "ok\n"},
		{method: "GET", path: "/readyz", code: 503, body: "not ready: engine is not up\n"},
		{method: "GET", path: "/readyz?entry=1", code: 200, body: "ready\n"},
		{method: "GET", path: "/metrics", code: 200, body: "# HELP grapevine_ready 1 if the own replica takes requests, else 0.\n# TYPE grapevine_ready gauge\ngrapevine_ready 1\n", kind: "text/plain"},
		{method: "GET", path: "/picks?id=x", code: 200, body: `"x"`, kind: "application/json"},
		{method: "GET", path: "/drained", code: 200, body: "not draining\n"},
		{method: "GET", path: "/engine/health", code: 503, body: "sleeping", kind: "text/x-engine"},
		{method: "GET", path: "/engine/metrics", code: 200, body: "vllm:num_requests_running 1\n", kind: "text/x-engine"},
		{method: "GET", path: "/drain", code: 405},
		{method: "POST", path: "/status", code: 405},
		{method: "POST", path: "/drain", code: 403, body: "GRAPEVINE_STATUS_TOKEN"},
		{method: "POST", path: "/drain", header: map[string]string{"Authorization": "Bearer s3cret"}, code: 202, body: "draining"},
		{method: "POST", path: "/drain", header: map[string]string{"Authorization": "Bearer guess"}, code: 403},
		{method: "POST", path: "/drain", remote: "127.0.0.1:9", host: "localhost:8082", code: 202},
		{method: "POST", path: "/drain", remote: "[::1]:9", host: "[::1]:8082", code: 202},
		{method: "POST", path: "/drain", remote: "127.0.0.1:9", host: "evil.example", code: 403},
		{method: "POST", path: "/drain", remote: "127.0.0.1:9", host: "127.0.0.1:8082", header: map[string]string{"Authorization": "Bearer guess"}, code: 403},
		{method: "POST", path: "/drain", remote: "127.0.0.1:9", host: "127.0.0.1:8082", header: map[string]string{"Origin": "http://evil.example"}, code: 403},
		{method: "POST", path: "/drain", remote: "127.0.0.1:9", host: "127.0.0.1:8082", header: map[string]string{"Sec-Fetch-Site": "cross-site"}, code: 403},
		{method: "POST", path: "/drain", remote: "127.0.0.1:9", host: "127.0.0.1:8082", header: map[string]string{"X-Forwarded-For": "10.0.0.9"}, code: 403},
	} {
		r := httptest.NewRequest(row.method, row.path, nil)
		r.RemoteAddr, r.Host = cmpOr(row.remote, "10.0.0.9:1234"), cmpOr(row.host, "agent:8082")
		for k, v := range row.header {
			r.Header.Set(k, v)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		name := row.method + " " + row.path + " " + row.remote + " " + row.host
		assert.Equal(t, row.code, w.Code, name)
		assert.Contains(t, w.Body.String(), row.body, name)
		assert.True(t, strings.HasPrefix(w.Header().Get("Content-Type"), row.kind), "%s: %s", name, w.Header().Get("Content-Type"))
		assert.NotContains(t, w.Body.String(), "s3cret", name)
		local[name] = w.Body.String()
	}
}

func TestConsoleWithoutToken(t *testing.T) {
	c := testConsole()
	c.token = ""
	r := httptest.NewRequest("POST", "/drain", nil)
	r.Header.Set("Authorization", "Bearer ")
	r.RemoteAddr = "10.0.0.9:1"
	w := httptest.NewRecorder()
	c.handler().ServeHTTP(w, r)
	assert.Equal(t, 403, w.Code, "an empty token opens nothing")
}

func TestLivezFails(t *testing.T) {
	c := testConsole()
	c.alive = func() error { return errors.New("report loop stands still for 31s") }
	w := httptest.NewRecorder()
	c.handler().ServeHTTP(w, httptest.NewRequest("GET", "/livez", nil))
	assert.Equal(t, 503, w.Code)
	assert.Equal(t, "report loop stands still for 31s\n", w.Body.String())
}

// The page names nothing outside of its own listener.
func TestPageIsSelfContained(t *testing.T) {
	w := httptest.NewRecorder()
	testConsole().handler().ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	assert.NotContains(t, w.Body.String(), "http://")
	assert.NotContains(t, w.Body.String(), "https://")
	assert.NotContains(t, w.Body.String(), "ZgotmplZ")
}

func TestEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := testConsole()
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		w := httptest.NewRecorder()
		c.handler().ServeHTTP(w, httptest.NewRequest("GET", "/events", nil).WithContext(ctx))
		assert.Equal(t, "text/event-stream", w.Header().Get("Content-Type"))
		events := strings.Split(strings.TrimSuffix(w.Body.String(), "\n\n"), "\n\n")
		require.Len(t, events, 3, "one at once and one each second")
		for _, e := range events {
			lines := strings.Split(e, "\n")
			assert.Equal(t, "event: content", lines[0])
			for _, l := range lines[1:] {
				assert.True(t, strings.HasPrefix(l, "data: "), l)
			}
		}
		assert.Zero(t, c.subscribers.Load())
		c.subscribers.Store(maxSubscribers)
		w = httptest.NewRecorder()
		c.handler().ServeHTTP(w, httptest.NewRequest("GET", "/events", nil))
		assert.Equal(t, 503, w.Code)
	})
}

// Names in the status answer are a contract; see section "Status" of the README.
func TestStatusNames(t *testing.T) {
	b, err := json.Marshal(Status{Peers: []PeerStatus{{}}})
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, json.Unmarshal(b, &m))
	for _, k := range []string{"node", "boot", "version", "ready", "state", "engine", "gpu", "load", "peers", "picks", "queue", "gossip", "warnings"} {
		assert.Contains(t, m, k)
	}
	for _, k := range []string{"kind", "version", "models", "running", "waiting", "kv_usage"} {
		assert.Contains(t, m["engine"], k)
	}
	for _, k := range []string{"node", "address", "zone", "state", "age_ms", "running", "waiting", "kv_usage", "pending_tokens", "predicted_ttft_ms", "inflight_from_here"} {
		assert.Contains(t, m["peers"].([]any)[0], k)
	}
	for _, k := range []string{"members", "health_score"} {
		assert.Contains(t, m["gossip"], k)
	}
}

func TestMetricsHaveHelpAndUnit(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range Metrics {
		assert.False(t, seen[m.Name], m.Name)
		seen[m.Name] = true
		assert.True(t, strings.HasPrefix(m.Name, "grapevine_"), m.Name)
		assert.True(t, strings.HasSuffix(m.Help, ".") || strings.HasSuffix(m.Help, ")."), m.Name)
		assert.Equal(t, m.Type == counter, strings.HasSuffix(m.Name, "_total"), m.Name)
		if m.Type == histogram {
			assert.True(t, strings.HasSuffix(m.Name, "_seconds"), m.Name)
		}
		// Whatever has a unit has a base unit, at its place in the name and in the help; a count is named after what it counts, and
		// what is true or false says so.
		name, unit := strings.TrimSuffix(m.Name, "_total"), ""
		for u, said := range map[string]string{"_seconds": "seconds", "_bytes": "ytes", "_ratio": "0 to 1", "_tokens": "okens"} {
			if strings.HasSuffix(name, u) {
				unit = u
				assert.True(t, strings.Contains(m.Help, said) || m.Name == MetricRetryBudget, "%s: its help does not say %s", m.Name, said)
			}
		}
		switch {
		case unit != "", slices.Contains([]string{MetricGossipHealth, MetricNoModel, MetricRetryExhausted}, m.Name): // a score, and two whose things stand before what is said of them
		case strings.HasPrefix(m.Help, "1 if"), strings.HasPrefix(m.Help, "1 for"), strings.HasPrefix(m.Help, "Always 1"), strings.HasPrefix(m.Help, "1 in "):
			assert.Equal(t, gauge, m.Type, m.Name)
		default:
			assert.Regexp(t, `s(_total)?$`, m.Name, "it counts things: its name ends in them")
			assert.NotRegexp(t, `(?i)\bin (milli)?seconds|\bin (kilo|mega)?bytes|0 to 1`, m.Help, m.Name)
		}
	}
	assert.Equal(t, len(Metrics)+2, strings.Count(MetricsDocs(), "\n"))
}

func TestHistogram(t *testing.T) {
	g := newGathering()
	_, m := g.family(MetricTTFT, nil)
	m.Histogram = protoHistogram(proxy.Histogram{Bounds: []float64{0.1, 1}, Counts: []uint64{2, 3, 4}, Sum: 9})
	var b strings.Builder
	require.NoError(t, g.write(&b, expfmt.NewFormat(expfmt.TypeTextPlain)))
	assert.Contains(t, b.String(), `grapevine_first_content_seconds_bucket{le="0.1"} 2`)
	assert.Contains(t, b.String(), `grapevine_first_content_seconds_bucket{le="1"} 5`)
	assert.Contains(t, b.String(), `grapevine_first_content_seconds_bucket{le="+Inf"} 9`)
	assert.Contains(t, b.String(), `grapevine_first_content_seconds_sum 9`)
	p := expfmt.NewTextParser(model.UTF8Validation)
	_, err := p.TextToMetricFamilies(strings.NewReader(b.String()))
	require.NoError(t, err)
}
