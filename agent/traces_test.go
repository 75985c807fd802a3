package agent

import (
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/slim/otlp/common/v1"
	wire "go.opentelemetry.io/proto/slim/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/grapevine-lb/grapevine/agent/otlp"
)

// collected is a collector in the test's process.
type collected struct {
	mu    sync.Mutex
	spans []*wire.Span
	nodes map[string]string // service.instance.id by span id
	raw   []byte
}

func (c *collected) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	var m collector.ExportTraceServiceRequest
	if r.URL.Path != "/v1/traces" || proto.Unmarshal(b, &m) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw = append(c.raw, b...)
	for _, rs := range m.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				c.spans = append(c.spans, s)
				c.nodes[string(s.SpanId)] = attrOf(rs.Resource.Attributes, "service.instance.id")
			}
		}
	}
}

func attrOf(list []*common.KeyValue, key string) string {
	for _, a := range list {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

func (c *collected) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.spans)
}

// A request over two real agents is one tree at the collector, which the client's own span is the root of.
func TestTracesReachACollector(t *testing.T) {
	t.Parallel()
	c := &collected{nodes: map[string]string{}}
	s := httptest.NewServer(c)
	defer s.Close()
	agents, _ := fleetOf(t, 2, fast(), func(cfg *Config) {
		inTurn(cfg)
		var warnings []string
		cfg.Traces, warnings = otlp.FromEnv(map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": s.URL, "OTEL_BSP_SCHEDULE_DELAY": "50"})
		require.Empty(t, warnings)
	})
	a, b := agents[0], agents[1]
	const trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	hop := func() *wire.Span {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := slices.IndexFunc(c.spans, func(s *wire.Span) bool { return s.Name == "hop" })
		if i < 0 {
			return nil
		}
		return c.spans[i]
	}
	for range 2 { // in turn: one of two goes to the other replica
		req, err := http.NewRequest("POST", "http://"+a.Addresses().Client+"/v1/chat/completions", strings.NewReader(strings.Replace(chatBody, "hello there", "a secret", 1)))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("traceparent", "00-"+trace+"-"+parent+"-01")
		req.Header.Set("Authorization", "Bearer s3cret")
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		require.Equal(t, 200, res.StatusCode)
	}
	a.eventually(5*time.Second, "all spans", func() bool { return c.len() == 3+5 })
	h := hop()
	require.NotNil(t, h)
	c.mu.Lock()
	defer c.mu.Unlock()
	byID := map[string]*wire.Span{}
	for _, s := range c.spans {
		assert.Equal(t, trace, hex.EncodeToString(s.TraceId))
		byID[string(s.SpanId)] = s
	}
	for _, s := range c.spans {
		up := s
		for byID[string(up.ParentSpanId)] != nil {
			up = byID[string(up.ParentSpanId)]
		}
		assert.Equal(t, parent, hex.EncodeToString(up.ParentSpanId), "%s hangs below the client's span", s.Name)
	}
	var below []string
	for _, s := range c.spans {
		if up := byID[string(s.ParentSpanId)]; up == h || up != nil && byID[string(up.ParentSpanId)] == h {
			below = append(below, s.Name+" at "+c.nodes[string(s.SpanId)])
		}
	}
	assert.ElementsMatch(t, []string{"POST /v1/chat/completions at " + b.Node(), "chat sim at " + b.Node()}, below)
	assert.Equal(t, a.Node(), c.nodes[string(h.SpanId)])
	assert.NotContains(t, string(c.raw), "secret")
	assert.NotContains(t, string(c.raw), "s3cret")
	_, body := a.get("/metrics")
	assert.Contains(t, body, `grapevine_trace_spans_total{outcome="sent"} 6`+"\n")
}

// A collector that is not there is said once, and costs requests nothing.
func TestTracesWithoutCollector(t *testing.T) {
	t.Parallel()
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.Traces, _ = otlp.FromEnv(map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": refusedURL(t), "OTEL_BSP_SCHEDULE_DELAY": "20"})
	a := start(t, cfg, Options{})
	a.untilReady()
	code, _ := a.chat(chatBody)
	require.Equal(t, 200, code)
	started := time.Now()
	require.NoError(t, a.stop())
	assert.Less(t, time.Since(started), 10*time.Second)
	assert.Contains(t, a.log.String(), MsgTracesLost)
}
