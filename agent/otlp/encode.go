package otlp

import (
	"strings"
	"time"

	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/slim/otlp/common/v1"
	resource "go.opentelemetry.io/proto/slim/otlp/resource/v1"
	wire "go.opentelemetry.io/proto/slim/otlp/trace/v1"

	"github.com/grapevine-lb/grapevine/proxy/span"
)

// scope names what made the spans.
const scope = "github.com/grapevine-lb/grapevine"

// resourceOf describes the agent.
func resourceOf(c *Config, own []span.Attr) *resource.Resource {
	r := &resource.Resource{}
	seen := map[string]bool{}
	add := func(k string, v any) {
		if !seen[k] {
			seen[k] = true
			r.Attributes = append(r.Attributes, attribute(span.Attr{Key: k, Value: v}))
		}
	}
	if c.Service != "" {
		add("service.name", c.Service)
	}
	for _, p := range c.Resource { // the operator's word goes before ours
		add(p[0], p[1])
	}
	for _, a := range own {
		add(a.Key, a.Value)
	}
	add("service.name", "grapevine")
	return r
}

// request is one post.
func request(res *resource.Resource, version string, batch []*span.Trace) *collector.ExportTraceServiceRequest {
	var list []*wire.Span
	for _, t := range batch {
		for i := range t.Spans {
			list = append(list, spanOf(t, &t.Spans[i]))
		}
	}
	return &collector.ExportTraceServiceRequest{ResourceSpans: []*wire.ResourceSpans{{
		Resource:   res,
		ScopeSpans: []*wire.ScopeSpans{{Scope: &common.InstrumentationScope{Name: scope, Version: version}, Spans: list}},
	}}}
}

func spanOf(t *span.Trace, s *span.Span) *wire.Span {
	out := &wire.Span{TraceId: t.ID[:], SpanId: s.ID[:], TraceState: valid(t.State), Name: valid(s.Name), Kind: kindOf(s.Kind),
		StartTimeUnixNano: nanos(s.Start), EndTimeUnixNano: nanos(s.End), Attributes: attributes(s.Attrs)}
	if s.Parent != (span.ID{}) {
		out.ParentSpanId = s.Parent[:]
	}
	for _, e := range s.Events {
		out.Events = append(out.Events, &wire.Span_Event{Name: e.Name, TimeUnixNano: nanos(e.At), Attributes: attributes(e.Attrs)})
	}
	if s.Error != "" {
		out.Status = &wire.Status{Code: wire.Status_STATUS_CODE_ERROR, Message: s.Error}
	}
	return out
}

func kindOf(k span.Kind) wire.Span_SpanKind {
	switch k {
	case span.Server:
		return wire.Span_SPAN_KIND_SERVER
	case span.Client:
		return wire.Span_SPAN_KIND_CLIENT
	}
	return wire.Span_SPAN_KIND_INTERNAL
}

func nanos(t time.Time) uint64 { return uint64(max(0, t.UnixNano())) }

// valid makes a text UTF-8, which protobuf demands: one that is not would cost the whole batch.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func attributes(list []span.Attr) []*common.KeyValue {
	out := make([]*common.KeyValue, 0, len(list))
	for _, a := range list {
		out = append(out, attribute(a))
	}
	return out
}

func attribute(a span.Attr) *common.KeyValue {
	v := &common.AnyValue{}
	switch x := a.Value.(type) {
	case string:
		v.Value = &common.AnyValue_StringValue{StringValue: valid(x)}
	case bool:
		v.Value = &common.AnyValue_BoolValue{BoolValue: x}
	case int64:
		v.Value = &common.AnyValue_IntValue{IntValue: x}
	case float64:
		v.Value = &common.AnyValue_DoubleValue{DoubleValue: x}
	case []string:
		l := &common.ArrayValue{}
		for _, s := range x {
			l.Values = append(l.Values, &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: valid(s)}})
		}
		v.Value = &common.AnyValue_ArrayValue{ArrayValue: l}
	}
	return &common.KeyValue{Key: a.Key, Value: v}
}
