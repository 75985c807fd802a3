package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"
	wire "go.opentelemetry.io/proto/slim/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/grapevine-lb/grapevine/proxy/span"
)

// fake is a collector that answers each post by f.
type fake struct {
	t     *testing.T
	mu    sync.Mutex
	posts []*collector.ExportTraceServiceRequest
	heads []http.Header
	f     func(n int) (status int, header http.Header, body []byte, err error)
}

func (c *fake) RoundTrip(r *http.Request) (*http.Response, error) {
	b, err := io.ReadAll(r.Body)
	require.NoError(c.t, err)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(bytes.NewReader(b))
		require.NoError(c.t, err)
		b, err = io.ReadAll(z)
		require.NoError(c.t, err)
	}
	var m collector.ExportTraceServiceRequest
	require.NoError(c.t, proto.Unmarshal(b, &m))
	c.mu.Lock()
	c.posts, c.heads = append(c.posts, &m), append(c.heads, r.Header)
	n := len(c.posts)
	c.mu.Unlock()
	status, header, body := 200, http.Header{}, []byte(nil)
	if c.f != nil {
		if status, header, body, err = c.f(n); err != nil {
			return nil, err
		}
	}
	if r.Context().Err() != nil {
		return nil, r.Context().Err()
	}
	return &http.Response{StatusCode: status, Header: header, Body: io.NopCloser(bytes.NewReader(body))}, nil
}

func (c *fake) spans() (out []*wire.Span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.posts {
		out = append(out, p.ResourceSpans[0].ScopeSpans[0].Spans...)
	}
	return out
}

// exporterTo makes an exporter whose posts go to c, and starts it.
func exporterTo(t *testing.T, c *fake, vars ...string) (e *Exporter, problems *[]error, stop func()) {
	t.Helper()
	c.t = t
	cfg, warnings := FromEnv(env(append([]string{"EXPORTER_OTLP_ENDPOINT", "http://c:4318"}, vars...)...))
	require.Empty(t, warnings)
	problems = new([]error)
	e = New(*cfg, "v1", []span.Attr{span.Text("service.instance.id", "a.1"), span.Text("k", "ours")}, nil, func(err error) { *problems = append(*problems, err) })
	e.client.Transport = c
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = e.Run(ctx) }()
	return e, problems, func() { cancel(); <-done }
}

// pass lets d go by, and all come to rest.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// traceOf is a trace of n spans.
func traceOf(n int) *span.Trace {
	t := &span.Trace{ID: span.TraceID{1, 2}, State: "a=1"}
	for i := range n {
		t.Spans = append(t.Spans, span.Span{ID: span.ID{byte(i + 1)}, Name: "s", Kind: span.Internal, Start: time.Unix(1, 5), End: time.Unix(2, 0)})
	}
	return t
}

func TestExportOnTheWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c fake
		e, problems, stop := exporterTo(t, &c, "EXPORTER_OTLP_HEADERS", "api-key=k1", "EXPORTER_OTLP_COMPRESSION", "gzip", "RESOURCE_ATTRIBUTES", "k=theirs")
		tr := traceOf(2)
		tr.Spans[1].Parent, tr.Spans[1].Kind, tr.Spans[1].Error = tr.Spans[0].ID, span.Client, "reset"
		tr.Spans[1].Name = "chat \xff"
		tr.Spans[1].Attrs = []span.Attr{span.Text("s", "\xfe"), span.Int("i", 3), span.Float("f", 0.5), span.Bool("b", true), {Key: "l", Value: []string{"x", "y"}}}
		tr.Spans[1].Events = []span.Event{{Name: "first content", At: time.Unix(1, 9), Attrs: []span.Attr{span.Int("n", 1)}}}
		e.Export(tr)
		pass(4 * time.Second)
		assert.Empty(t, c.spans(), "not before its time")
		pass(2 * time.Second)
		got := c.spans()
		require.Len(t, got, 2)
		root, child := got[0], got[1]
		assert.Equal(t, tr.ID[:], root.TraceId)
		assert.Empty(t, root.ParentSpanId)
		assert.Equal(t, uint64(1_000_000_005), root.StartTimeUnixNano)
		assert.Equal(t, "a=1", root.TraceState)
		assert.Nil(t, root.Status)
		assert.Equal(t, root.SpanId, child.ParentSpanId)
		assert.Equal(t, wire.Span_SPAN_KIND_CLIENT, child.Kind)
		assert.Equal(t, "chat \uFFFD", child.Name, "one odd name does not cost the batch")
		assert.Equal(t, wire.Status_STATUS_CODE_ERROR, child.Status.Code)
		assert.Equal(t, `s:"�" i:3 f:0.5 b:true l:[x y]`, attrText(child))
		assert.Equal(t, "first content", child.Events[0].Name)
		rs := c.posts[0].ResourceSpans[0]
		assert.Equal(t, `k:"theirs" service.instance.id:"a.1" service.name:"grapevine"`, attrText(&wire.Span{Attributes: rs.Resource.Attributes}))
		assert.Equal(t, "v1", rs.ScopeSpans[0].Scope.Version)
		assert.Equal(t, "k1", c.heads[0].Get("Api-Key"))
		assert.Equal(t, "application/x-protobuf", c.heads[0].Get("Content-Type"))
		assert.Equal(t, Stats{Sent: 2}, e.Stats())
		assert.Equal(t, []error{nil}, *problems)
		stop()
	})
}

func attrText(s *wire.Span) string {
	var out []string
	for _, a := range s.Attributes {
		v := a.Value
		_, text, _ := strings.Cut(v.String(), ":")
		if v.GetArrayValue() != nil {
			var l []string
			for _, x := range v.GetArrayValue().Values {
				l = append(l, x.GetStringValue())
			}
			text = "[" + strings.Join(l, " ") + "]"
		}
		out = append(out, a.Key+":"+strings.TrimSpace(text))
	}
	return strings.Join(out, " ")
}

// A full batch goes at once, the rest waits; what the queue cannot hold is dropped and counted.
func TestExportQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		c := fake{f: func(n int) (int, http.Header, []byte, error) {
			if n == 1 {
				<-hold
			}
			return 200, nil, nil, nil
		}}
		e, _, stop := exporterTo(t, &c, "BSP_MAX_QUEUE_SIZE", "20", "BSP_MAX_EXPORT_BATCH_SIZE", "10")
		for range 5 {
			e.Export(traceOf(2))
		}
		synctest.Wait() // the first batch is under way
		for range 11 {
			e.Export(traceOf(2))
		}
		assert.Equal(t, uint64(2), e.Stats().Dropped)
		e.Export(traceOf(1))
		assert.Equal(t, uint64(3), e.Stats().Dropped)
		close(hold)
		synctest.Wait()
		assert.Len(t, c.spans(), 30)
		stop()
		assert.Equal(t, Stats{Sent: 30, Dropped: 3}, e.Stats())
	})
}

// What may help later is tried again for half a minute; what cannot is given up at once.
func TestExportRepeats(t *testing.T) {
	for name, row := range map[string]struct {
		f     func(n int) (int, http.Header, []byte, error)
		after time.Duration // of the last post
		posts int           // 0: several
		stats Stats
	}{
		"later": {func(n int) (int, http.Header, []byte, error) { return []int{503, 429, 200}[n-1], nil, nil, nil }, 4 * time.Second, 3, Stats{Sent: 1}},
		"when it says": {func(n int) (int, http.Header, []byte, error) {
			return []int{503, 200}[n-1], http.Header{"Retry-After": {"7"}}, nil, nil
		}, 8 * time.Second, 2, Stats{Sent: 1}},
		"never":           {func(int) (int, http.Header, []byte, error) { return 400, nil, nil, nil }, time.Second, 1, Stats{Failed: 1}},
		"a redirect":      {func(int) (int, http.Header, []byte, error) { return 302, nil, nil, nil }, time.Second, 1, Stats{Failed: 1}},
		"nobody is there": {func(int) (int, http.Header, []byte, error) { return 0, nil, nil, errors.New("refused") }, 31 * time.Second, 0, Stats{Failed: 1}},
		"asked to wait too long": {func(int) (int, http.Header, []byte, error) {
			return 503, http.Header{"Retry-After": {"3600"}}, nil, nil
		}, time.Second, 1, Stats{Failed: 1}},
		"a part is refused": {func(int) (int, http.Header, []byte, error) {
			b, err := proto.Marshal(&collector.ExportTraceServiceResponse{PartialSuccess: &collector.ExportTracePartialSuccess{RejectedSpans: 1}})
			return 200, nil, b, err
		}, time.Second, 1, Stats{Rejected: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fake{f: row.f}
				e, problems, stop := exporterTo(t, &c, "BSP_SCHEDULE_DELAY", "100")
				e.Export(traceOf(1))
				pass(100*time.Millisecond + row.after)
				if row.posts > 0 {
					assert.Len(t, c.posts, row.posts)
				} else {
					assert.Greater(t, len(c.posts), 5)
				}
				assert.Equal(t, row.stats, e.Stats())
				require.Len(t, *problems, 1)
				assert.Equal(t, row.stats.Failed > 0, (*problems)[0] != nil)
				stop()
			})
		})
	}
}

// At the end everything that waits is sent, and nobody who does not answer keeps the agent.
func TestExportAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c fake
		e, _, stop := exporterTo(t, &c, "BSP_MAX_EXPORT_BATCH_SIZE", "10")
		for range 6 {
			e.Export(traceOf(3))
		}
		stop()
		assert.Equal(t, Stats{Sent: 18}, e.Stats())
	})
	synctest.Test(t, func(t *testing.T) {
		c := fake{f: func(int) (int, http.Header, []byte, error) { return 503, nil, nil, nil }}
		e, _, stop := exporterTo(t, &c, "BSP_SCHEDULE_DELAY", "100")
		e.Export(traceOf(1))
		pass(200 * time.Millisecond) // it is tried again and again
		e.Export(traceOf(1))
		start := time.Now()
		stop()
		assert.Less(t, time.Since(start), 2*flushFor)
		assert.Equal(t, Stats{Failed: 2}, e.Stats())
	})
}
