package agent

import (
	"github.com/grapevine-lb/grapevine/agent/otlp"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/proxy/span"
)

// setTraces makes the exporter that the configuration asks for.
func (a *Agent) setTraces() {
	c := a.cfg.Traces
	if c == nil {
		return
	}
	own := []span.Attr{span.Text("service.instance.id", a.member.Node), span.Text("service.version", Version()), span.Text("grapevine.cluster", a.cfg.Cluster)}
	if a.cfg.Zone != "" {
		own = append(own, span.Text("grapevine.zone", a.cfg.Zone))
	}
	a.traces = otlp.New(*c, Version(), own, a.opts.Dial, a.tracesSent)
}

// tracing is how the proxy traces; nil = it does not.
func (a *Agent) tracing() *proxy.Tracing {
	if a.traces == nil {
		return nil
	}
	a.log.Info(MsgTraces, "url", redactURL(a.cfg.Traces.URL), "sampler", a.cfg.Traces.Sampler.String())
	return &proxy.Tracing{Sample: a.traces.Sample, Export: a.traces.Export}
}

// tracesSent is told how each batch went.
func (a *Agent) tracesSent(err error) {
	if err == nil {
		a.clear("traces")
		return
	}
	text := MsgTracesLost + ": " + redactURL(err.Error())
	if a.warn("traces", text) {
		a.log.Warn(MsgTracesLost, KeyErr, redactURL(err.Error()), KeyHint, "is a collector there that takes OTLP over HTTP (port 4318)? Requests are not affected")
	}
}

func (a *Agent) collectTraces(g *gathering) {
	if a.traces == nil {
		return
	}
	s := a.traces.Stats()
	g.add(MetricTraceSpans, float64(s.Sent), "sent")
	g.add(MetricTraceSpans, float64(s.Dropped), "dropped")
	g.add(MetricTraceSpans, float64(s.Failed), "failed")
	g.add(MetricTraceSpans, float64(s.Rejected), "rejected")
}
