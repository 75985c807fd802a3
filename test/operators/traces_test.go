package operators

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// value is one attribute as OTLP's JSON has it.
type value map[string]any

func (v value) String() string {
	for k, x := range v {
		if k == "arrayValue" {
			var out []string
			for _, e := range x.(map[string]any)["values"].([]any) {
				out = append(out, value(e.(map[string]any)).String())
			}
			return "[" + strings.Join(out, " ") + "]"
		}
		return fmt.Sprint(x)
	}
	return ""
}

type attributes []struct {
	Key   string
	Value value
}

func (a attributes) get(key string) string {
	for _, x := range a {
		if x.Key == key {
			return x.Value.String()
		}
	}
	return ""
}

type spanJSON struct {
	TraceID, SpanID, ParentSpanID, Name string
	StartTimeUnixNano                   string
	Kind                                int
	Attributes                          attributes
	node                                string // service.instance.id
}

// sink takes what the Collector gives away.
type sink struct {
	mu    sync.Mutex
	spans map[string][]spanJSON // by trace
	all   strings.Builder
}

func (s *sink) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	var m struct {
		ResourceSpans []struct {
			Resource   struct{ Attributes attributes }
			ScopeSpans []struct{ Spans []spanJSON }
		}
	}
	if err := json.Unmarshal(b, &m); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all.Write(b)
	for _, rs := range m.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, sp := range ss.Spans {
				sp.node, _, _ = strings.Cut(rs.Resource.Attributes.get("service.instance.id"), ".")
				s.spans[sp.TraceID] = append(s.spans[sp.TraceID], sp)
			}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, "{}")
}

// startCollector builds OpenTelemetry's Collector from its own modules and starts it; what it gets goes to s.
func startCollector(t *testing.T, stage *harness.Stage, s *sink) (url string) {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "collector")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = filepath.Join(harness.Root(t), "test", "collector")
	began := time.Now()
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("the Collector is built: %s", time.Since(began).Round(time.Second))
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	addr := stage.Addr(9, 4318)
	config := filepath.Join(dir, "collector.yaml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `
receivers: { otlp: { protocols: { http: { endpoint: %q } } } }
exporters: { otlp_http: { endpoint: %q, encoding: json, compression: none } }
service:
  telemetry: { metrics: { level: none } }
  pipelines: { traces: { receivers: [ otlp ], exporters: [ otlp_http ] } }
`, addr, server.URL), 0o600))
	p := stage.Start("collector", nil, program, "--config", "file:"+config)
	p.WaitLine("Everything is ready", 30*time.Second)
	return "http://" + addr
}

// TestTraces: requests over two agents, collected by the real Collector, are one tree each from the client's span to the engine,
// with what the pick knew.
func TestTraces(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	got := &sink{spans: map[string][]spanJSON{}}
	collector := startCollector(t, s, got)
	var engines []string
	for i := range 3 {
		engines = append(engines, s.FakeEngine(i+1).URL)
	}
	agents := s.Mesh(engines, harness.Env{"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_SERVICE_NAME": "llm", "OTEL_BSP_SCHEDULE_DELAY": "200",
		"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"})
	// So much at one entry that its own engine cannot be the best for all.
	const requests = 8
	var wg sync.WaitGroup
	var ids [requests]string
	for i := range requests {
		var trace [16]byte
		for j := range trace {
			trace[j] = byte(rand.UintN(255) + 1)
		}
		ids[i] = hex.EncodeToString(trace[:])
		wg.Go(func() {
			body := fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"the secret is %d %s"}]}`, i, strings.Repeat("word ", 4000))
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, agents[0].URL+"/v1/chat/completions", strings.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Authorization", "Bearer s3cret")
			req.Header.Set("traceparent", "00-"+ids[i]+"-00f067aa0ba902b7-01")
			res, err := http.DefaultClient.Do(req)
			if assert.NoError(t, err) {
				_, _ = io.Copy(io.Discard, res.Body)
				_ = res.Body.Close()
				assert.Equal(t, 200, res.StatusCode)
			}
		})
		time.Sleep(20 * time.Millisecond)
	}
	wg.Wait()
	whole := func() (n int) {
		got.mu.Lock()
		defer got.mu.Unlock()
		for _, id := range ids {
			if slices.ContainsFunc(got.spans[id], func(s spanJSON) bool { return s.ParentSpanID == "00f067aa0ba902b7" }) && engineSpans(got.spans[id]) > 0 {
				n++
			}
		}
		return n
	}
	harness.Eventually(t, 20*time.Second, "all traces", func() bool { return whole() == requests })
	got.mu.Lock()
	defer got.mu.Unlock()
	hops, shown := 0, false
	for _, id := range ids {
		tree, over := treeOf(t, got.spans[id])
		if over == 0 {
			continue
		}
		hops++
		if asked := slices.IndexFunc(got.spans[id], func(s spanJSON) bool { return s.Name == "pick" && s.Attributes.get("grapevine.pick.reason") == "asked" }); asked >= 0 && !shown {
			shown = true
			t.Logf("trace %s\n%s", id, tree)
			p := got.spans[id][asked].Attributes
			assert.Equal(t, "auto", p.get("grapevine.policy"))
			assert.Contains(t, p.get("grapevine.pick.asked"), "agent")
			assert.NotEmpty(t, p.get("grapevine.pick.runner_up"))
			assert.NotEmpty(t, p.get("grapevine.score_ms"))
			assert.NotEmpty(t, p.get("grapevine.replica"))
		}
	}
	t.Logf("%d traces, %d over two agents", requests, hops)
	assert.True(t, shown, "no request was moved by what the asked replicas said")
	assert.NotContains(t, got.all.String(), "secret is")
	assert.NotContains(t, got.all.String(), "s3cret")
	assert.Contains(t, got.all.String(), "deployment.environment.name")
}

func engineSpans(list []spanJSON) (n int) {
	for _, s := range list {
		if s.Attributes.get("gen_ai.provider.name") != "" {
			n++
		}
	}
	return n
}

// treeOf writes a trace as a tree, and counts the requests below a hop. All of it must hang below the client's span.
func treeOf(t *testing.T, list []spanJSON) (text string, overTwo int) {
	t.Helper()
	slices.SortStableFunc(list, func(a, b spanJSON) int { return strings.Compare(a.StartTimeUnixNano, b.StartTimeUnixNano) })
	var b strings.Builder
	seen := 0
	var under func(parent, hop string, depth int)
	under = func(parent, hop string, depth int) {
		for _, s := range list {
			if s.ParentSpanID != parent {
				continue
			}
			seen++
			fmt.Fprintf(&b, "%s%s (%s)", strings.Repeat("  ", depth+1), s.Name, s.node)
			for _, a := range s.Attributes {
				fmt.Fprintf(&b, " %s=%s", a.Key, a.Value)
			}
			b.WriteString("\n")
			if hop == "hop" && s.Kind == 2 {
				overTwo++
			}
			under(s.SpanID, s.Name, depth+1)
		}
	}
	under("00f067aa0ba902b7", "", 0)
	assert.Equal(t, len(list), seen, "one tree:\n%s", &b)
	return b.String(), overTwo
}
