package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy/span"
	"github.com/grapevine-lb/grapevine/routing"
)

// spans collects what all agents of a test export.
type spans struct {
	mu   sync.Mutex
	list []*span.Trace
}

func (s *spans) export(t *span.Trace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, t)
}

// always and parentBased are two of OpenTelemetry's samplers.
func always(span.TraceID, span.Context) bool               { return true }
func parentBased(_ span.TraceID, parent span.Context) bool { return parent.Sampled }
func (s *spans) tracing(f func(span.TraceID, span.Context) bool) *Tracing {
	return &Tracing{Sample: f, Export: s.export}
}

// tree writes all spans, each below its parent, in the order of their starts; what has no parent among them stands at the left.
func (s *spans) tree(t *testing.T) string {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []span.Span
	ids := map[span.ID]bool{}
	for _, tr := range s.list {
		assert.Equal(t, s.list[0].ID, tr.ID, "one trace")
		for _, sp := range tr.Spans {
			assert.False(t, ids[sp.ID], "an id is used once")
			assert.False(t, sp.End.Before(sp.Start), "%s ends before it begins", sp.Name)
			assert.NotEmpty(t, sp.Name)
			ids[sp.ID] = true
			all = append(all, sp)
		}
	}
	slices.SortStableFunc(all, func(a, b span.Span) int { return a.Start.Compare(b.Start) })
	var b strings.Builder
	var under func(parent span.ID, depth int)
	under = func(parent span.ID, depth int) {
		for _, sp := range all {
			if sp.Parent != parent && (depth > 0 || ids[sp.Parent]) {
				continue
			}
			fmt.Fprintf(&b, "%s%s [%d]", strings.Repeat("  ", depth), sp.Name, sp.Kind)
			for _, k := range []string{"grapevine.role", "grapevine.replica", "grapevine.pick.reason", "grapevine.result", "grapevine.hold.outcome", "grapevine.outcome",
				"http.response.status_code", "http.request.resend_count", "grapevine.continuation", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"} {
				if v := attr(sp, k); v != nil {
					fmt.Fprintf(&b, " %v", v)
				}
			}
			if sp.Error != "" {
				fmt.Fprintf(&b, " !%s", sp.Error)
			}
			b.WriteString("\n")
			under(sp.ID, depth+1)
		}
	}
	under(span.ID{}, 0)
	return b.String()
}

func attr(s span.Span, key string) any {
	for _, a := range s.Attrs {
		if a.Key == key {
			return a.Value
		}
	}
	return nil
}

func (s *spans) named(name string) (out []span.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.list {
		for _, sp := range t.Spans {
			if sp.Name == name {
				out = append(out, sp)
			}
		}
	}
	return out
}

const (
	parentTrace  = "4bf92f3577b34da6a3ce929d0e0e4736"
	parentHeader = "00-" + parentTrace + "-00f067aa0ba902b7-01"
	usageAnswer  = `{"choices":[{"index":0,"message":{"role":"assistant","content":"secret answer"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":2}}}`
)

// A request over two hops is one tree from the client's span to the engine, with what the pick knew.
func TestTraceOverTwoHops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got spans
		var log bytes.Buffer
		b := answers(200, usageAnswer)
		f := newFleet(t, []uint64{2}, func(i int, c *Config) {
			c.Tracing = got.tracing(parentBased)
			c.EngineKind = func() string { return "vllm" }
			if i == 0 {
				c.AccessLog, c.Logger = 1, slog.New(slog.NewTextHandler(&log, nil))
			}
		}, answers(200, `{}`), b)
		resp, _, err := f.get(strings.Replace(chatBody(false), "hello there", "secret prompt", 1), "traceparent", parentHeader, "tracestate", "a=1,b=2", "Authorization", "Bearer secret key")
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		f.idle()
		assert.Equal(t, `POST /v1/chat/completions [2] entry ok 200 7 3
  pick [1] n2 best
  hop [3] n2 ok
    POST /v1/chat/completions [2] target ok 200 7 3
      chat m [3] n2 ok 7 3
`, got.tree(t))
		assert.Equal(t, parentTrace, got.list[0].ID.String())
		assert.Equal(t, "a=1,b=2", got.list[0].State)
		server := got.named("POST /v1/chat/completions")
		i := slices.IndexFunc(server, func(s span.Span) bool { return attr(s, "grapevine.role") == "entry" })
		assert.Equal(t, "00f067aa0ba902b7", server[i].Parent.String(), "the client's span is the parent")
		llm := got.named("chat m")[0]
		for k, want := range map[string]any{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.provider.name": "vllm", "server.address": "engine2",
			"server.port": int64(80), "gen_ai.usage.cache_read.input_tokens": int64(2), "http.request.method": "POST"} {
			assert.Equal(t, want, attr(llm, k), k)
		}
		pick := got.named("pick")[0]
		assert.Equal(t, "in_order", attr(pick, "grapevine.policy"))
		assert.Equal(t, int64(2), attr(pick, "grapevine.pick.candidates"))
		assert.InDelta(t, 100, attr(pick, "grapevine.score_ms"), 0.01)
		// The engine is told its span, and what other systems put into the state goes on.
		assert.Equal(t, "00-"+parentTrace+"-"+llm.ID.String()+"-01", b.last().Get("Traceparent"))
		assert.Equal(t, "a=1,b=2", b.last().Get("Tracestate"))
		assert.NotContains(t, fmt.Sprintf("%+v", got.list[0])+fmt.Sprintf("%+v", got.list[1]), "secret")
		// The record of picks and the access log name the trace.
		assert.Equal(t, parentTrace, f.agents[0].Picks("")[0].Trace)
		assert.Contains(t, log.String(), "trace="+parentTrace)
		assert.Contains(t, log.String(), "replica=n2")
		assert.Contains(t, log.String(), "input_tokens=7 output_tokens=3")
		assert.NotContains(t, log.String(), "secret")
	})
}

// Attempts that failed, and a stream that went on elsewhere, are spans of their own.
func TestTraceRetryAndContinuation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got spans
		full := answers(503, `{"error":"full"}`)
		cut := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			eventHead(w)
			say(w, roleChunk+chunk("one "))
			time.Sleep(10 * time.Millisecond)
			die()
		})
		f := newFleet(t, []uint64{2, 1, 3}, func(i int, c *Config) {
			c.Tracing = got.tracing(always)
			c.Continue = func(string) Continuation { return Continuation{Chat: true, Opens: true} }
		}, cut, full, streams(time.Millisecond, roleChunk, chunk("two"), finishChunk, doneChunk))
		resp, body, err := f.get(chatBody(true))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		require.Contains(t, body, "two")
		f.idle()
		assert.Equal(t, `POST /v1/chat/completions [2] entry ok 200
  pick [1] n2 best
  hop [3] n2 busy
    POST /v1/chat/completions [2] target busy 503 !busy
      chat m [3] n2 busy
  pick [1] n1 best
  chat m [3] n1 reset 1 !reset
  pick [1] n3 best
  hop [3] n3 ok 2 true
    POST /v1/chat/completions [2] target ok 200
      chat m [3] n3 ok
`, got.tree(t))
		hops := got.named("hop")
		assert.Equal(t, "first content", got.named("chat m")[1].Events[0].Name)
		assert.Equal(t, "reset", attr(hops[len(hops)-1], "grapevine.continuation.reason"))
	})
}

// A wait at the gate is a span beside the engine's, which begins when the engine gets the request.
func TestTraceHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got spans
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			eventHead(w)
			time.Sleep(50 * time.Millisecond)
			say(w, roleChunk+chunk("x")+finishChunk+doneChunk)
		})
		f := newFleet(t, []uint64{1}, func(i int, c *Config) { c.Tracing = got.tracing(always) }, e)
		long := strings.Replace(chatBody(true), "hello there", strings.Repeat("hello there ", 5000), 1)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				resp, err := f.post(context.Background(), long)
				if assert.NoError(t, err) {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			})
			time.Sleep(time.Millisecond)
		}
		wg.Wait()
		f.idle()
		holds := got.named("hold")
		require.Len(t, holds, 1)
		assert.Equal(t, "started", attr(holds[0], "grapevine.hold.outcome"))
		assert.InDelta(t, 49*time.Millisecond, holds[0].End.Sub(holds[0].Start), float64(3*time.Millisecond))
		llm := got.named("chat m")
		require.Len(t, llm, 2)
		assert.Equal(t, holds[0].End, llm[1].Start)
		assert.Equal(t, holds[0].Parent, llm[1].Parent)
	})
}

// What nobody can serve has a pick that says why, and nothing below it.
func TestTraceOfARefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got spans
		f := newFleet(t, nil, func(i int, c *Config) { c.Tracing = got.tracing(always) }, answers(200, `{}`))
		resp, _, _ := f.get(chatBody(false))
		assert.Equal(t, 503, resp.StatusCode)
		f.idle()
		assert.Equal(t, "POST /v1/chat/completions [2] entry refused 503 !refused\n  pick [1] none_usable !none_usable\n", got.tree(t))
	})
}

// Whether a trace is recorded is decided once: whoever comes later is told, and begins none of its own.
func TestTraceContext(t *testing.T) {
	unsampled := strings.TrimSuffix(parentHeader, "01") + "00"
	for name, row := range map[string]struct {
		sample        func(span.TraceID, span.Context) bool // nil: nobody traces
		parent, state string
		engine        string // what the engine gets: the same, or a part of it
		engineState   string
		exported      int
	}{
		"off, nothing":           {nil, "", "", "", "", 0},
		"off, passed on":         {nil, parentHeader, "a=1", parentHeader, "a=1", 0},
		"off, odd":               {nil, "odd", "a=1", "odd", "a=1", 0},
		"unsampled parent":       {parentBased, unsampled, "a=1", "00-" + parentTrace + "-", "a=1", 0},
		"unsampled root":         {parentBased, "", "", "-00", "", 0},
		"sampled root":           {always, "", "", "-01", "", 2},
		"an odd one is replaced": {always, "odd", "a=1", "-01", "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got spans
				b := answers(200, `{}`)
				f := newFleet(t, []uint64{2}, func(i int, c *Config) {
					if row.sample != nil {
						c.Tracing = got.tracing(row.sample)
					}
				}, answers(200, `{}`), b)
				var header []string
				if row.parent != "" {
					header = append(header, "traceparent", row.parent)
				}
				if row.state != "" {
					header = append(header, "tracestate", row.state)
				}
				_, _, err := f.get(chatBody(false), header...)
				require.NoError(t, err)
				f.idle()
				at := b.last().Get("Traceparent")
				assert.Contains(t, at, row.engine)
				assert.Equal(t, row.engine == "", at == "", at)
				assert.Equal(t, row.engineState, b.last().Get("Tracestate"))
				assert.Len(t, got.list, row.exported)
				if row.exported > 1 {
					assert.Equal(t, got.list[0].ID, got.list[1].ID, "one trace")
				}
			})
		})
	}
}

// Off costs nothing: every hook is a check for nil.
func TestTraceOffAllocatesNothing(t *testing.T) {
	x := &exchange{}
	h := make(Header, 0, 4)
	d := routing.Decision{}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		x.trace.picking()
		x.trace.heard(&d, nil)
		x.trace.begin(x, nil, nil)
		x.trace.inject(&h)
		x.trace.waited(x, time.Time{}, 1, true)
		x.trace.end(x, nil, "ok", routing.OutcomeOK)
		x.trace.finish(x, time.Time{})
		_ = x.trace.id()
	}))
}
