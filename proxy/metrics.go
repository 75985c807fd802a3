package proxy

import (
	"sync/atomic"
	"time"
)

// Outcomes of requests as the client saw them: a closed list, exactly one for each request at its entry agent and
// one at its target (C107).
const (
	outcomeOK          = "ok"
	outcomeClientError = "client_error" // 4xx of the engine, a cut upload included
	outcomeServerError = "server_error" // 5xx of the engine, passed on
	outcomeBusy        = "busy"         // 429 or 503 of the engine, passed on
	outcomeRefused     = "refused"      // an error of our own
	outcomeCancel      = "client_cancel"
	outcomeCut         = "stream_cut"   // broken after the answer had begun
	outcomeStreamError = "stream_error" // the engine said so inside a stream
	outcomeTimeout     = "timeout"
	outcomeDeadly      = "deadly"
)

var outcomeNames = []string{outcomeOK, outcomeClientError, outcomeServerError, outcomeBusy, outcomeRefused, outcomeCancel,
	outcomeCut, outcomeStreamError, outcomeTimeout, outcomeDeadly}

// Upper bounds of the histograms' buckets, in seconds. The last bucket has none.
var (
	ttftBounds     = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120}
	durationBounds = []float64{0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
)

// Histogram is a snapshot of one.
type Histogram struct {
	Bounds []float64 // seconds, ascending
	Counts []uint64  // one more than Bounds; not cumulative
	Sum    float64   // seconds
}

type histogram struct {
	bounds []float64
	counts []atomic.Uint64
	sum    atomic.Int64 // microseconds
}

func newHistogram(bounds []float64) histogram {
	return histogram{bounds: bounds, counts: make([]atomic.Uint64, len(bounds)+1)}
}

func (h *histogram) observe(d time.Duration) {
	s, i := d.Seconds(), 0
	for i < len(h.bounds) && s > h.bounds[i] {
		i++
	}
	h.counts[i].Add(1)
	h.sum.Add(d.Microseconds())
}

func (h *histogram) snapshot() Histogram {
	s := Histogram{Bounds: h.bounds, Counts: make([]uint64, len(h.counts)), Sum: float64(h.sum.Load()) / 1e6}
	for i := range h.counts {
		s.Counts[i] = h.counts[i].Load()
	}
	return s
}

// counters is a fixed set of labelled counters.
type counters struct {
	names  []string
	counts []atomic.Uint64
}

func newCounters(names []string) counters {
	return counters{names: names, counts: make([]atomic.Uint64, len(names))}
}

func (c *counters) add(name string) {
	for i, n := range c.names {
		if n == name {
			c.counts[i].Add(1)
			return
		}
	}
}

func (c *counters) snapshot() map[string]uint64 {
	m := make(map[string]uint64, len(c.names))
	for i, n := range c.names {
		m[n] = c.counts[i].Load()
	}
	return m
}

// metrics are the proxy's counters. All labels come from fixed lists.
type metrics struct {
	entry     counters // by outcome, requests that entered here
	target    counters // by outcome, requests that came from other agents to our engine
	retries   counters // by reason
	refusals  counters // by reason of our own errors
	continues counters // by reason and outcome

	toSelf, toPeer atomic.Uint64 // attempts sent
	replays        atomic.Uint64 // reused connections that were dead
	unreadable     atomic.Uint64 // bodies in which no model was found
	bytesOut       atomic.Uint64 // answer bytes to clients and entry agents
	promptTokens   atomic.Uint64 // estimated, or from usage where it came
	outputTokens   atomic.Uint64 // from usage, or counted events
	cachedTokens   atomic.Uint64 // from usage

	ask   askMetrics
	steal stealMetrics

	ttft     histogram // entry: from the request's arrival to the first content
	duration histogram // entry: from arrival to the end
}

// Metrics is a snapshot of the proxy's counters. Map keys are label values from fixed lists, all present from the start.
type Metrics struct {
	EntryByOutcome, TargetByOutcome map[string]uint64
	Retries                         map[string]uint64
	Refusals                        map[string]uint64
	Continues                       map[string]uint64 // legs by "reason outcome"
	AttemptsSelf, AttemptsPeer      uint64
	Replays                         uint64
	NoModel                         uint64
	BytesOut                        uint64
	PromptTokens                    uint64
	OutputTokens                    uint64
	CachedTokens                    uint64
	RetryBudget                     float64 // tokens left
	RetryBudgetExhausted            uint64
	BodyBytes                       int64 // memory of kept bodies
	Inflight                        int   // requests under way here, both roles
	TTFT, Duration                  Histogram
	Ask                             AskCounts
	Gate                            GateCounts
	Steal                           StealCounts
}

// AskCounts counts questions for exact scores: a request asks several replicas at once.
type AskCounts struct {
	Requests uint64 // requests for which somebody was asked
	Answered uint64 // answers in time
	Refused  uint64 // of those, the ones that refuse
	Missed   uint64 // no answer in time
	Changed  uint64 // requests that the answers sent elsewhere than gossip would have
	Given    uint64 // answers that this agent gave
	Turned   uint64 // requests whose target refused once, having become busier than it had said
	Took     Histogram
}

func newMetrics() *metrics {
	return &metrics{
		ask:   askMetrics{took: newHistogram(askBounds)},
		entry: newCounters(outcomeNames), target: newCounters(outcomeNames), retries: newCounters(retryReasons),
		refusals: newCounters(refusalReasons()), continues: newCounters(continueLabels()), ttft: newHistogram(ttftBounds), duration: newHistogram(durationBounds),
	}
}

// refusalReasons lists the reasons of our own errors.
func refusalReasons() []string {
	var out []string
	for _, e := range []*apiError{errModelNotFound, errModelUnavailable, errNoService, errTooLong, errAllFull, errNoneUsable,
		errDraining, errTooLarge, errBodyMemory, errTooManyRequests, errPathNotAllowed, errFirstByte, errBroken,
		errStreamBroken, errDeadly, errQueueFull, errLongWait, errQueueTimeout, errMoved, errBusier, errLoop, errForgedHop, errUnauthorized, errHostRefused, errMethod, errBadRequest, errEngineRefused, errEngineCut, errDeadline} {
		out = append(out, e.Reason)
	}
	out = append(out, reasonConnections)
	return out
}

// Metrics returns the counters as they are now.
func (p *Proxy) Metrics() Metrics {
	m := p.metrics
	tokens, refused := p.budget.state(time.Now())
	return Metrics{
		EntryByOutcome: m.entry.snapshot(), TargetByOutcome: m.target.snapshot(), Retries: m.retries.snapshot(),
		Refusals: m.refusals.snapshot(), Continues: m.continues.snapshot(),
		AttemptsSelf: m.toSelf.Load(), AttemptsPeer: m.toPeer.Load(), Replays: m.replays.Load(), NoModel: m.unreadable.Load(),
		BytesOut: m.bytesOut.Load(), PromptTokens: m.promptTokens.Load(), OutputTokens: m.outputTokens.Load(),
		CachedTokens: m.cachedTokens.Load(), RetryBudget: tokens, RetryBudgetExhausted: refused,
		BodyBytes: p.bodies.used.Load(), Inflight: int(p.inflight.Load()),
		TTFT: m.ttft.snapshot(), Duration: m.duration.snapshot(), Gate: p.gate.counts(),
		Steal: StealCounts{Given: m.steal.given.Load(), None: m.steal.none.Load(), Failed: m.steal.failed.Load(), Came: m.steal.came.Load(),
			Moved: m.steal.moved.Load()},
		Ask: AskCounts{Requests: m.ask.requests.Load(), Answered: m.ask.answered.Load(), Refused: m.ask.refused.Load(),
			Missed: m.ask.missed.Load(), Changed: m.ask.changed.Load(), Given: m.ask.given.Load(), Turned: m.ask.turned.Load(), Took: m.ask.took.snapshot()},
	}
}
