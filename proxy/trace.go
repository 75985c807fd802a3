package proxy

import (
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/span"
	"github.com/grapevine-lb/grapevine/routing"
)

// Tracing is how requests are traced: W3C trace context in and out, OpenTelemetry's spans. No span holds a prompt, an answer
// or a key.
type Tracing struct {
	// Sample decides whether a request is recorded. parent is what it came with; the zero value if that was nothing.
	Sample func(id span.TraceID, parent span.Context) bool
	// Export takes what is to be told about one request, which nobody writes to any more. It must not block.
	Export func(*span.Trace)
}

const (
	headerTraceParent = "traceparent"
	headerTraceState  = "tracestate"

	mostTraceState = 512 // bytes; a longer one passes by untold, since half of a list says something else (W3C, 3.3.1.5)
)

// traced is one request's trace. All methods may be called on nil, which is what every request has while nobody traces;
// only the exchange's goroutine calls them.
//
// The spans of a request at its entry: the request; in it each pick, each wait at the own gate, and each attempt, at the own
// engine or over one hop. The hop is the parent of the request at its target, which has the wait and the engine in it.
type traced struct {
	cfg    *Tracing
	self   span.Context // of the span of the request itself
	parent span.ID
	root   bool // it came with no context

	out      span.Trace
	picked   time.Time    // when the pick under way began
	asked    []string     // nodes, by that pick
	answers  []span.Event // what they said
	attempt  int          // index in out.Spans of the attempt under way; 0 = none, since the request's own span is there
	attempts int
	held     bool // the attempt under way has waited at the gate
}

// startTrace begins the request's trace.
func (x *exchange) startTrace() {
	t := &traced{cfg: x.p.cfg.Tracing, root: true}
	h := x.in.Header
	parent := span.Context{}
	if h.Count(headerTraceParent) == 1 {
		if c, ok := span.Parse(strings.TrimSpace(h.Get(headerTraceParent))); ok {
			parent, t.root = c, false
		}
	}
	t.self.Trace, t.parent = parent.Trace, parent.Span
	for t.self.Trace == (span.TraceID{}) {
		binary.BigEndian.PutUint64(t.self.Trace[:8], rand.Uint64())
		binary.BigEndian.PutUint64(t.self.Trace[8:], rand.Uint64())
	}
	t.self.Span = newSpanID()
	if t.self.Sampled = t.cfg.Sample(t.self.Trace, parent); t.self.Sampled {
		t.out.ID = t.self.Trace
		if s := h.Get(headerTraceState); !t.root && h.Count(headerTraceState) == 1 && len(s) <= mostTraceState {
			t.out.State = strings.Clone(s)
		}
		t.out.Spans = append(make([]span.Span, 0, 4), span.Span{ID: t.self.Span, Parent: t.parent, Kind: span.Server, Start: x.arrived})
	}
	x.trace = t
}

// newSpanID makes an id. It comes from no generator with a seed: ids must differ between agents that make the same choices.
func newSpanID() (id span.ID) {
	for id == (span.ID{}) {
		binary.BigEndian.PutUint64(id[:], rand.Uint64())
	}
	return id
}

// on reports whether spans are recorded.
func (t *traced) on() bool { return t != nil && t.self.Sampled }

// id is the trace's name for logs and records, "" if nothing is recorded.
func (t *traced) id() string {
	if !t.on() {
		return ""
	}
	return t.self.Trace.String()
}

// inject tells the next one, the target's agent or the engine, to which span it belongs. What is not recorded here says so,
// so that it begins no trace there.
func (t *traced) inject(h *Header) {
	if t == nil {
		return
	}
	c := t.self
	if t.attempt > 0 {
		c.Span = t.out.Spans[t.attempt].ID
	}
	h.Set(headerTraceParent, c.String())
	if t.root {
		h.Del(headerTraceState) // it belonged to what could not be read
	}
}

// picking notes that a replica is looked for.
func (t *traced) picking() {
	if t.on() && t.picked.IsZero() {
		t.picked = time.Now()
	}
}

// heard notes what those said whom a pick asked.
func (t *traced) heard(d *routing.Decision, answers []routing.Answer) {
	if !t.on() {
		return
	}
	now := time.Now()
	for _, p := range d.Asked() {
		t.asked = append(t.asked, p.Member().Node)
	}
	for _, a := range answers {
		t.answers = append(t.answers, span.Event{Name: "answer", At: now, Attrs: []span.Attr{span.Text("grapevine.replica", d.Ask[a.Index].Member().Node),
			span.Float("grapevine.score_ms", a.Score*1000), span.Int("grapevine.prompt_tokens", a.Tokens), span.Bool("grapevine.refused", !a.OK)}})
	}
}

// pick closes the span of a pick. to is nil if nobody could be picked.
func (t *traced) pick(x *exchange, reason routing.Reason, to *PickAttempt, now time.Time) {
	if !t.on() || x.role == roleTarget {
		return
	}
	if t.picked.IsZero() {
		t.picked = now // nobody was looked for: the request was moved
	}
	s := span.Span{ID: newSpanID(), Parent: t.self.Span, Name: "pick", Kind: span.Internal, Start: t.picked, End: now, Events: t.answers,
		Attrs: []span.Attr{span.Text("grapevine.policy", x.p.cfg.Policy.Name()), span.Text("grapevine.pick.reason", reason.String()),
			span.Int("grapevine.pick.candidates", x.rec.Candidates)}}
	if len(t.asked) > 0 {
		s.Attrs = append(s.Attrs, span.Attr{Key: "grapevine.pick.asked", Value: t.asked})
	}
	if to == nil {
		s.Error = reason.String()
	} else {
		s.Attrs = append(s.Attrs, span.Text("grapevine.replica", to.Node), span.Float("grapevine.score_ms", to.ScoreMS),
			span.Int("grapevine.pick.answered", to.Answered), span.Float("grapevine.pick.ask_ms", to.AskMS))
		if to.RunnerUp != "" {
			s.Attrs = append(s.Attrs, span.Text("grapevine.pick.runner_up", to.RunnerUp), span.Float("grapevine.pick.runner_up_score_ms", to.RunnerUpMS))
		}
		if to.AgeMS >= 0 {
			s.Attrs = append(s.Attrs, span.Float("grapevine.pick.report_age_ms", to.AgeMS))
		}
	}
	t.out.Spans = append(t.out.Spans, s)
	t.picked, t.asked, t.answers = time.Time{}, nil, nil
}

// begin opens the span of an attempt; the pick that led to it is over.
func (t *traced) begin(x *exchange, a *attempt, to *PickAttempt) {
	if !t.on() {
		return
	}
	t.pick(x, to.Reason, to, a.at)
	s := span.Span{ID: newSpanID(), Parent: t.self.Span, Kind: span.Client, Start: a.at}
	if a.self {
		u := x.p.cfg.EngineURL
		host, port := u.Hostname(), u.Port()
		if u.Scheme == "unix" {
			host = u.Path
		}
		s.Name = strings.TrimSpace(operation(&x.class) + " " + span.Text("", x.req.Model).Value.(string))
		s.Attrs = append(x.genAI(), serverAttrs(host, cmp.Or(port, map[string]string{"http": "80", "https": "443"}[u.Scheme]))...)
		if kind := x.kindOf(a.peer); kind != "" {
			s.Attrs = append(s.Attrs, span.Text("gen_ai.provider.name", kind))
		}
	} else {
		host, port, _ := net.SplitHostPort(a.peer.Member().Addr)
		s.Name = "hop"
		s.Attrs = append(s.Attrs, serverAttrs(host, port)...)
	}
	s.Attrs = append(s.Attrs, span.Text("http.request.method", spanMethod(x.in.Method)), span.Text("grapevine.replica", to.Node))
	if t.attempts > 0 {
		s.Attrs = append(s.Attrs, span.Int("http.request.resend_count", t.attempts))
	}
	if x.goesOn() {
		s.Attrs = append(s.Attrs, span.Bool("grapevine.continuation", true), span.Text("grapevine.continuation.reason", x.cont.reason))
	}
	t.attempts++
	t.held = false
	t.out.Spans = append(t.out.Spans, s)
	t.attempt = len(t.out.Spans) - 1
}

func serverAttrs(host, port string) []span.Attr {
	a := []span.Attr{span.Text("server.address", host)}
	if n, err := strconv.Atoi(port); err == nil {
		a = append(a, span.Int("server.port", n))
	}
	return a
}

// waited adds the span of a wait at the own gate; what follows at the engine begins at its end.
func (t *traced) waited(x *exchange, from time.Time, tokens int, started bool) {
	if !t.on() {
		return
	}
	now := time.Now()
	outcome := "started"
	switch {
	case started:
	case x.moved.how == leftStolen:
		outcome = "stolen"
	case x.moved.how == leftDrained:
		outcome = "drained"
	case x.ctx.Err() != nil:
		outcome = outcomeCancel
	default:
		outcome = outcomeTimeout
	}
	t.held = true
	t.out.Spans[t.attempt].Start = now
	t.out.Spans = append(t.out.Spans, x.holdSpan(from, now, tokens, outcome))
}

func (x *exchange) holdSpan(from, to time.Time, tokens int, outcome string) span.Span {
	return span.Span{ID: newSpanID(), Parent: x.trace.self.Span, Name: "hold", Kind: span.Internal, Start: from, End: to,
		Attrs: []span.Attr{span.Text("grapevine.hold.outcome", outcome), span.Int("grapevine.prompt_tokens", tokens)}}
}

// end closes the span of an attempt that came to that result. One that never left the gate has none: its wait, or its
// refusal, says it all.
func (t *traced) end(x *exchange, a *attempt, result string, o routing.Outcome) {
	if !t.on() {
		return
	}
	now := time.Now()
	s := &t.out.Spans[t.attempt]
	s.End = now
	switch {
	case a.self && a.flight == nil && t.held:
		t.out.Spans = append(t.out.Spans[:t.attempt], t.out.Spans[t.attempt+1:]...)
		t.attempts--
	case a.self && a.flight == nil:
		*s = x.holdSpan(a.at, now, a.tokens, result)
		s.Error = result
		t.attempts--
	default:
		s.Attrs = append(s.Attrs, span.Text("grapevine.result", result))
		if a.self {
			s.Attrs = append(s.Attrs, x.usage()...)
		}
		if x.begun && !x.firstAt.IsZero() && !x.firstAt.Before(s.Start) {
			s.Events = append(s.Events, span.Event{Name: "first content", At: x.firstAt})
		}
		switch o {
		case routing.OutcomeOK, routing.OutcomeCancelled, routing.OutcomeClientError, routing.OutcomeBusy:
		default:
			s.Error = result
			s.Attrs = append(s.Attrs, span.Text("error.type", result))
		}
	}
	t.attempt = 0
}

// finish closes the request's own span and gives the trace away.
func (t *traced) finish(x *exchange, now time.Time) {
	if !t.on() {
		return
	}
	s := &t.out.Spans[0]
	s.End = now
	s.Name = spanMethod(x.in.Method) + " " + x.class.Route
	s.Attrs = append(x.genAI(), span.Text("http.request.method", spanMethod(x.in.Method)), span.Text("http.route", x.class.Route), span.Text("url.scheme", x.in.Scheme),
		span.Text("grapevine.role", x.role.String()), span.Text("grapevine.outcome", x.outcome), span.Text("grapevine.request.id", x.id),
		span.Int("grapevine.attempts", len(x.rec.Attempts)))
	s.Attrs = append(s.Attrs, x.usage()...)
	if x.status != 0 {
		s.Attrs = append(s.Attrs, span.Int("http.response.status_code", x.status))
	}
	if !x.firstAt.IsZero() {
		s.Events = append(s.Events, span.Event{Name: "first content", At: x.firstAt})
	}
	switch x.outcome {
	case outcomeOK, outcomeCancel:
	case outcomeClientError, outcomeBusy, outcomeRefused: // an error of the client's is none of the server's
		s.Attrs = append(s.Attrs, span.Text("error.type", x.outcome))
		if x.status >= 500 {
			s.Error = x.outcome
		}
	default:
		s.Attrs = append(s.Attrs, span.Text("error.type", x.outcome))
		s.Error = x.outcome
	}
	t.cfg.Export(&t.out)
}

// genAI are the attributes of the GenAI conventions that are known from the request.
func (x *exchange) genAI() []span.Attr {
	a := make([]span.Attr, 0, 16)
	if x.class.Service == 0 {
		return a
	}
	a = append(a, span.Text("gen_ai.operation.name", operation(&x.class)))
	if x.req.Model != "" {
		a = append(a, span.Text("gen_ai.request.model", x.req.Model))
	}
	if n := x.peek.MaxTokens; n > 0 {
		a = append(a, span.Int("gen_ai.request.max_tokens", n))
	}
	if x.peek.Stream {
		a = append(a, span.Bool("gen_ai.request.stream", true))
	}
	return a
}

// usage is what the engine said that the newest attempt took.
func (x *exchange) usage() (a []span.Attr) {
	u := &x.sift.scan.usage
	for _, f := range []struct {
		key string
		v   routing.Opt[int]
	}{{"gen_ai.usage.input_tokens", u.Prompt}, {"gen_ai.usage.output_tokens", u.Completion}, {"gen_ai.usage.cache_read.input_tokens", u.Cached}} {
		if f.v.OK {
			a = append(a, span.Int(f.key, f.v.V))
		}
	}
	return a
}

// operation is the GenAI conventions' name for what a path does, or the path where they have none.
func operation(c *pathClass) string {
	switch c.Service {
	case routing.ServeChat, routing.ServeResponses, routing.ServeMessages:
		return "chat"
	case routing.ServeCompletions:
		return "text_completion"
	case routing.ServeEmbeddings:
		return "embeddings"
	}
	return c.Route
}

// spanMethod is the method where it is one of those that HTTP defines.
func spanMethod(m string) string {
	switch m {
	case "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH":
		return m
	}
	return "_OTHER"
}
