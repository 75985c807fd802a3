package proxy

import (
	"context"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// hold is a request that waits at the gate: a claim on our engine. Whoever takes it out of the queue, under the gate's
// lock, owns what happens next; so it starts here or moves, never both.
type hold struct {
	g      *gate
	room   *pass // memory for its pass; nil = none
	req    *routing.Request
	tokens int     // prompt tokens that our engine must compute
	cost   float64 // tokens that its tenant is charged
	tenant uint64  // hash of who shares with others; 0 = not known
	owner  *tenant // in the queue
	blind  bool    // its first token will not be seen
	fixed  bool    // it was moved once already: it stays
	since  time.Time
	ready  chan leave // capacity 1
}

// Errors of the gate.
var (
	errQueueFull = &apiError{Status: 429, Code: "queue_full", Reason: "queue_full", RetryAfter: time.Second,
		Message: "Too many requests are waiting for this replica."}
	errLongWait = &apiError{Status: 429, Code: "overloaded", Reason: "long_wait", RetryAfter: time.Second,
		Message: "The request would wait longer for a free replica than its class, or its deadline, allows."}
	errQueueTimeout = &apiError{Status: 429, Code: "queue_timeout", Reason: "queue_timeout", RetryAfter: 5 * time.Second,
		Message: "The request has waited too long for a free replica."}
)

// errMoved is a target's answer to an entry agent whose request it has given away; never for clients.
var errMoved = &apiError{Status: 503, Code: "moved", Reason: "moved", RetryAfter: time.Second,
	Message: "The request was handed to another replica."}

// gated reports whether the request waits at the gate.
func (x *exchange) gated() bool {
	return !x.p.gate.off && !x.grpc && x.in.Upgrade == "" && x.req.PromptTokens > 0 &&
		x.class.Service&gatedServices != 0
}

// enter brings an attempt at our own engine through the gate. ok false: it came to v instead.
func (x *exchange) enter(ctx context.Context, a *attempt, w *watch, now time.Time) (v verdict, o routing.Outcome, ok bool) {
	if x.busier(now) {
		x.fail(errBusier)
		return verdictDone, routing.OutcomeCancelled, false
	}
	if !x.gated() {
		x.start(a, nil, now)
		return 0, 0, true
	}
	h := &x.hold
	if x.held {
		h = new(hold) // a thief may still look at the former one
	}
	*h = hold{room: &a.pass, req: &x.req, tokens: a.tokens, tenant: x.tenant(), blind: !x.peek.Stream, fixed: x.fixed}
	p, refused := x.p.gate.arrive(h, x.ticket, now)
	if x.ticket != 0 && p != nil {
		x.p.step(stepInvited)
	}
	x.ticket = 0
	if refused != nil {
		return x.refuse(refused)
	}
	if p == nil {
		p, v, o = x.wait(ctx, h, w)
		if x.trace.waited(x, now, a.tokens, p != nil); p == nil {
			return v, o, false
		}
		now = time.Now()
	}
	x.start(a, p, now)
	x.p.step(stepStarted)
	return 0, 0, true
}

// wait holds the request until its turn comes, or something else ends the wait.
func (x *exchange) wait(ctx context.Context, h *hold, w *watch) (*pass, verdict, routing.Outcome) {
	g := &x.p.gate
	x.held = true
	w.set(0, errCauseFirst, time.Now()) // the wait for the first byte counts from the start at the engine
	x.stage(stageHeld)
	x.p.step(stepHeld)
	limit := time.NewTimer(max(g.patience(h.line())-time.Since(x.waits()), 0))
	defer limit.Stop()
	select {
	case l := <-h.ready:
		switch l.how {
		case leftStolen:
			x.moved = l
			return x.passOn()
		case leftDrained:
			x.moved = leave{how: leftDrained}
			return x.passOn()
		case leftShed:
			v, o, _ := x.refuse(errQueueFull.with(errQueueFull.Message, g.drainTime()))
			return nil, v, o
		}
		w.set(x.first, errCauseFirst, time.Now())
		x.stage(stageStarted)
		return l.pass, 0, 0
	case <-ctx.Done():
		g.drop(h, time.Now())
		if x.ctx.Err() == nil { // the attempt was ended, not the exchange
			return nil, verdictCut, routing.OutcomeCancelled
		}
		return nil, x.stopped(), routing.OutcomeCancelled
	case <-limit.C:
		g.drop(h, time.Now())
		g.metrics.timedOut.Add(1)
		x.fail(errQueueTimeout.with(errQueueTimeout.Message, g.drainTime()))
		return nil, verdictDone, routing.OutcomeCancelled
	}
}

// passOn ends an attempt whose request left our queue for another replica.
func (x *exchange) passOn() (*pass, verdict, routing.Outcome) {
	if x.role == roleEntry {
		return nil, verdictMoved, routing.OutcomeCancelled
	}
	if x.moved.how == leftDrained {
		x.fail(errDraining)
	} else {
		x.failMoved()
	}
	return nil, verdictDone, routing.OutcomeCancelled
}

// refuse ends an attempt that our own gate did not take: an entry looks elsewhere. It counts for nobody: our record says which
// classes are refused, and for others the replica is as good as before.
func (x *exchange) refuse(e *apiError) (verdict, routing.Outcome, bool) {
	if x.role == roleEntry {
		x.refused, x.req.Full = e, true
		return verdictRefused, routing.OutcomeCancelled, false
	}
	x.fail(e)
	return verdictDone, routing.OutcomeCancelled, false
}

// start counts the request as given to our own engine.
func (x *exchange) start(a *attempt, p *pass, now time.Time) {
	tokens := a.tokens
	if x.units != x.p.account.units.Load() { // they were learned while the request waited
		tokens = max(1, tokens*x.p.lessons.tokens(x.req.Model, &x.peek)/max(1, x.req.PromptTokens))
	}
	a.mu.Lock()
	a.flight = &a.room
	prefill := x.p.account.start(a.flight, tokens, &a.life, x.watch, now)
	a.flight.pass = p
	a.mu.Unlock()
	if d := x.p.cfg.Digest; d != nil && len(x.req.Prefix) > 0 {
		d.Touch(x.req.Prefix, x.req.Ends)
	}
	if !x.peek.Stream {
		x.watch.predict(a, prefill, now)
	}
}

// SetEngine takes a reading of our own engine's pages.
func (p *Proxy) SetEngine(v EngineView) { p.gate.see(v, time.Now()) }

// uncached returns how many prompt tokens our own engine must compute for the request, at least 1.
func (x *exchange) uncached() int {
	n := x.req.PromptTokens
	if d := x.p.cfg.Digest; d != nil && len(x.req.Prefix) > 0 {
		n -= x.req.Cached(d.Match(x.req.Prefix))
	}
	return max(1, n)
}

// evidence compares what our digest believed to be cached with what the engine says that it had, both in its own tokens.
func (x *exchange) evidence(a *attempt, u *replyUsage) {
	d, n := x.p.cfg.Digest, x.req.PromptTokens
	if d == nil || !a.self || !u.Cached.OK || !u.Prompt.OK || n <= 0 || len(x.req.Prefix) == 0 {
		return
	}
	share := float64(max(0, n-a.tokens)) / float64(n)
	d.Correct(int(share*float64(u.Prompt.V)), u.Cached.V)
}
