package proxy

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

const (
	savedBody    = 64 << 10    // bytes of an error answer that are kept while another replica is tried
	reusedWindow = time.Second // a kept connection that ends within it had died before our request came
)

// answer is a whole answer that may be passed on later.
type answer struct {
	head      ResponseHead
	body      []byte
	fromAgent bool
}

// attempt is one request under way to one replica. Each count that it makes up, it takes back once.
type attempt struct {
	p       *Proxy
	peer    *routing.Peer
	self    bool    // our own engine
	tokens  int     // prompt tokens that it is believed to compute, at least 1
	flight  *flight // at our own engine; nil = not there
	room    flight  // for it
	pass    pass    // likewise, through the gate
	life    life
	stop    func() bool // unties it from a context that is no life; nil = it is tied to one
	ans     *Answer     // under way
	at      time.Time
	predict float64         // seconds to the first token, by the pick; 0 = nothing was predicted
	refusal routing.Outcome // what a refusal by the replica's agent that is passed on counts as; OutcomeOK = its engine answered
	stages  stages          // what a peer's agent said on the way

	mu    sync.Mutex
	first bool // the prefill is over, as far as we can tell
	ended bool
}

// try sends the request to d.Peer and passes on whatever may be passed on. Any verdict but done and gone leaves the
// client without the end of an answer.
func (x *exchange) try(d *choice) verdict {
	a := x.begin(d)
	v, o := x.send(a)
	return x.endTry(a, v, o)
}

// endTry does the bookkeeping of an attempt that came to v.
func (x *exchange) endTry(a *attempt, v verdict, o routing.Outcome) verdict {
	if v == verdictParked {
		return v
	}
	x.over = time.Now()
	a.end(o, x.over)
	x.leg = o
	if v == verdictCut && o == routing.OutcomeReset && !x.content && !x.announced(a.peer) {
		switch {
		case !a.prefilled():
			x.deaths++
		case x.p.deadly.blame(x.in.Target, x.body, time.Now()) >= deadlyBlames:
			x.deaths = deadlyDeaths
		}
	}
	x.attempt.Result = o.String()
	if v == verdictMoved {
		x.attempt.Result = "moved"
	}
	x.trace.end(x, a, x.attempt.Result, o)
	x.keepAttempt(a)
	return v
}

// keepAttempt keeps the memory of an attempt that is over for the next one, if the exchange's goroutine alone has it. The watch,
// the flights and the exchange's life have forgotten it.
func (x *exchange) keepAttempt(a *attempt) {
	if !orphan(x.ctx, &a.life) || x.held {
		x.lent = true
		return
	}
	*a = attempt{}
	x.spare = a
}

// begin does the bookkeeping of a new attempt.
func (x *exchange) begin(d *choice) *attempt {
	now := d.at
	if now.IsZero() {
		now = time.Now()
	}
	m := d.Peer.Member()
	a := x.spare
	if x.spare = nil; a == nil {
		a = new(attempt)
	}
	a.peer, a.self, a.tokens, a.at, a.predict, a.p = d.Peer, d.Peer.Boot() == x.p.self, d.Tokens, now, d.First, x.p
	if a.self {
		a.tokens = x.uncached()
	}
	a.tokens = max(1, a.tokens) // as the table counts it
	d.Peer.Sent(a.tokens, now)
	at := d.Peer.Heard()
	pa := PickAttempt{Node: m.Node, Boot: m.Boot, Reason: d.Reason, ScoreMS: d.Score * 1000, AgeMS: -1,
		Asked: x.askNote.asked, Answered: x.askNote.answered, AskMS: ms(x.askNote.took)}
	if d.RunnerUp != nil {
		pa.RunnerUp, pa.RunnerUpMS = d.RunnerUp.Member().Node, d.RunnerUpScore*1000
	}
	if !at.IsZero() {
		pa.AgeMS = ms(now.Sub(at))
	}
	x.rec.Attempts = append(x.rec.Attempts, pa)
	x.attempt = &x.rec.Attempts[len(x.rec.Attempts)-1]
	x.trace.begin(x, a, x.attempt)
	if a.self {
		x.p.metrics.toSelf.Add(1) // it starts behind the gate
	} else {
		x.p.metrics.toPeer.Add(1)
	}
	return a
}

// prefillTime predicts when another replica has worked off this prompt and those before it.
func (a *attempt) prefillTime() time.Duration {
	r, _ := a.peer.Report()
	return time.Duration(float64(r.PendingTokens.Or(0)+a.tokens) / max(r.PrefillRate.Or(defaultPrefillRate), 1) * float64(time.Second))
}

// firstToken says that the first content was seen.
func (a *attempt) firstToken(now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.flight != nil && !a.ended {
		a.flight.first(now)
	}
	if a.predict > 0 && !a.ended {
		a.peer.Observe(time.Duration(a.predict*float64(time.Second)), now.Sub(a.at), now)
	}
	a.leave(now)
}

// predicted says that the prefill must be over by now.
func (a *attempt) predicted(now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.flight != nil && !a.ended {
		a.flight.predicted(now)
	}
	a.leave(now)
}

// prefilled reports whether the prefill is over, as far as can be told: an answer that is not streamed shows nothing, and is no
// suspect when its replica dies long after.
func (a *attempt) prefilled() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.first
}

func (a *attempt) leave(now time.Time) {
	if !a.first && !a.ended {
		a.first = true
		a.peer.FirstToken(a.tokens, now)
	}
}

// end takes back what begin counted.
func (a *attempt) end(o routing.Outcome, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return
	}
	a.ended = true
	left := a.tokens
	if a.first {
		left = 0
	}
	a.peer.Done(o, left, now)
	if a.flight != nil {
		a.flight.done(now, o == routing.OutcomeOK)
		a.p.suspicion.note(o, now)
	}
}

// announced reports whether the replica had said that it would go.
func (x *exchange) announced(p *routing.Peer) bool {
	r, _ := p.Report()
	return r.Flags&routing.FlagDraining != 0 || r.State == routing.StateDraining || r.Goodbye ||
		p.Boot() == x.p.self && x.p.draining.Load()
}

// upstream returns the way to the replica: our own engine, or a member's agent at the address in the member list.
func (x *exchange) upstream(a *attempt) upstream {
	if a.self {
		return x.p.engine
	}
	m := a.peer.Member()
	return x.p.links.get(&x.p.cfg, m.Boot, m.Addr)
}

var outgoings = sync.Pool{New: func() any { return new(Outgoing) }}

// outgoing makes the request as the replica gets it.
func (x *exchange) outgoing(a *attempt, now time.Time) *Outgoing {
	p := x.p
	if x.out == nil {
		x.out = outgoings.Get().(*Outgoing)
	}
	o := x.out
	h := append(slices.Grow(o.Header[:0], len(x.header)+4), x.header...)
	if a.self {
		h.DelFunc(func(name string) bool { return hasPrefixFold(name, headerPrefix) })
		if p.cfg.EngineAPIKey != "" {
			h.Set("authorization", "Bearer "+p.cfg.EngineAPIKey)
		}
	} else {
		h.Set(headerHop, p.hop)
		x.moveFields(&h, a.peer)
	}
	x.trace.inject(&h)
	*o = Outgoing{Method: x.in.Method, Target: x.in.Target, Host: x.in.Host, Header: h, HTTP2: x.grpc, Upgrade: x.in.Upgrade, Now: now}
	b := x.body
	switch {
	case x.cont != nil && x.cont.body != nil:
		x.continued(o, a.self)
		return o
	case b.src == nil:
	case b.complete():
		o.Length = b.n
		if b.n > 0 {
			o.Body = b.open()
		}
	default:
		o.Length = x.in.Length
		o.Body = b.open()
	}
	if a.self {
		x.rename(o)
	}
	return o
}

// send runs the attempt: request, head, body. Its outcome is for the replica's books.
func (x *exchange) send(a *attempt) (verdict, routing.Outcome) {
	now := a.at
	ctx := &a.life
	a.stop = newAttempt(x.ctx, ctx)
	w := x.p.watches.Get().(*watch)
	w.start(ctx, x.first, errCauseFirst, now)
	x.watch = w
	defer x.sent(a)
	if !x.peek.Stream && !a.self {
		// Its first byte is its last, so the prompt leaves the pending count when it should be done.
		w.predict(a, a.prefillTime(), now)
	}

	if a.self {
		if v, o, ok := x.enter(ctx, a, w, now); !ok {
			return v, o
		}
	}
	up := x.upstream(a)
	if x.held { // it waited
		now = time.Now()
	}
	sent := now
	out := x.outgoing(a, now)
	if !a.self {
		out.Interim = x.onInterim(a, w)
	}
	ans, err := up.Send(ctx, out)
	if err != nil && x.diedIdle(ctx, err, sent) {
		// The server closed a kept connection just when we used it: it never saw the request (C36).
		x.p.metrics.replays.Add(1)
		x.p.metrics.retries.add(retryReused)
		up.dropIdle()
		ans, err = up.Send(ctx, x.outgoing(a, time.Now()))
		if se, ok := errors.AsType[*SendError](err); ok && se.Stage == StageDial {
			// Nobody listens any more: it was not the idle limit but the server's end, with our request in it or not.
			se.Stage = StageNoReply
		}
	}
	if err != nil {
		if a.stages.notRun() && x.ctx.Err() == nil {
			return verdictNoConnect, routing.OutcomeRefused // its agent ended while it held the request
		}
		return x.sendFailed(ctx, err)
	}
	if !a.self {
		x.takeRecord(a.peer.Boot(), up, ans)
	}
	if ans.Tunnel != nil {
		return x.tunnel(a, w, ans), routing.OutcomeOK
	}
	a.ans = ans
	if v, o, ok := x.judge(a, ans); !ok {
		return v, o
	}
	return x.relay(ctx, a, w, ans)
}

// sent lets go of what an attempt holds, when it is over.
func (x *exchange) sent(a *attempt) {
	if x.parked {
		return
	}
	if a.ans != nil {
		x.closeAnswer(a.ans)
	}
	w := x.watch
	w.stop()
	x.watch = nil
	x.p.watches.Put(w)
	a.life.end(errCauseDone)
	if a.stop != nil {
		a.stop()
	}
}

// diedIdle reports whether a kept connection ended just when it was used, and the request can be sent again.
func (x *exchange) diedIdle(ctx context.Context, err error, sent time.Time) bool {
	se, ok := errors.AsType[*SendError](err)
	return ok && se.Stage == StageNoReply && se.Reused && ctx.Err() == nil && x.body.again() && time.Since(sent) < reusedWindow
}

// closeAnswer ends what is left of an answer and lets go of its memory, unless somebody else has it: the head may be
// saved, and net/http writes fields after the handler's end.
func (x *exchange) closeAnswer(ans *Answer) {
	_ = ans.Body.Close()
	if _, own := x.down.(*wireDown); own && ans.Recycle != nil {
		ans.Recycle()
	}
}

// sendFailed says what an attempt without an answer's head came to.
func (x *exchange) sendFailed(ctx context.Context, err error) (verdict, routing.Outcome) {
	if errors.Is(x.body.failure(), errBodyTooLarge) {
		x.fail(errTooLarge)
		return verdictDone, routing.OutcomeCancelled
	}
	if x.ctx.Err() != nil || x.body.failure() != nil { // a broken upload surfaces as the upstream's error (C12)
		return x.stopped(), routing.OutcomeCancelled
	}
	if cause := context.Cause(ctx); errors.Is(cause, errCauseFirst) {
		return verdictTimeout, routing.OutcomeTimeout
	} else if errors.Is(cause, errCauseDrain) {
		if x.role == roleTarget {
			x.fail(errDraining)
			x.outcome = outcomeCut
			return verdictDone, routing.OutcomeCancelled
		}
		return verdictCut, routing.OutcomeCancelled
	}
	var se *SendError
	if !errors.As(err, &se) {
		return verdictCut, routing.OutcomeReset
	}
	x.log.Debug("attempt failed", "id", x.id, "node", x.attempt.Node, "stage", se.Stage, "error", se.Err)
	switch se.Stage {
	case StageDial:
		return verdictNoConnect, routing.OutcomeRefused
	case StageHead:
		return verdictCut, routing.OutcomeMalformed
	}
	return verdictCut, routing.OutcomeReset
}

// takeRecord hands the sender's load record on.
func (x *exchange) takeRecord(from uint64, up upstream, ans *Answer) {
	v := ans.Head.Header.Get(headerLoad)
	if v == "" || x.p.cfg.OnRecord == nil {
		return
	}
	if u, ok := up.(*wireUpstream); ok {
		if last := u.record.Load(); last != nil && *last == v {
			return // it came with another answer before
		}
		u.record.Store(new(strings.Clone(v)))
	}
	if b, err := base64.RawStdEncoding.DecodeString(v); err == nil {
		x.p.cfg.OnRecord(from, b)
	}
}

// judge looks at an answer's head before any of it goes out. ok means that it is to be passed on.
func (x *exchange) judge(a *attempt, ans *Answer) (v verdict, o routing.Outcome, ok bool) {
	h := &ans.Head
	reason := ""
	if !a.self {
		reason = h.Header.Get(headerReason)
		if l, ok := movedTo(h.Header.Get(headerMoved)); ok && reason == errMoved.Reason && x.role == roleEntry {
			x.moved = l
			return verdictMoved, routing.OutcomeCancelled, false
		}
		if reason == errBusier.Reason && x.limit > 0 && x.role == roleEntry {
			x.turned, x.moved = true, leave{how: leftBusier}
			x.p.metrics.ask.turned.Add(1)
			return verdictMoved, routing.OutcomeCancelled, false
		}
	}
	cleanResponse(&h.Header, !a.self)
	x.tellServed(&h.Header, a.peer)
	if x.role == roleTarget {
		return 0, 0, true // the entry agent judges
	}
	if h.Status < 400 {
		if x.headOut && (h.Status != 200 || !isEventStream(h.Header)) {
			return verdictBroken, routing.OutcomeCancelled, false // nothing can follow the head that went out
		}
		return 0, 0, true
	}
	if h.Status < 500 && h.Status != 429 && !x.headOut && reason == "" {
		return 0, 0, true // the client's own error
	}
	s, whole := x.keep(ans, reason != "")
	v, o = x.classifyError(a, s, reason)
	if reason != "" {
		a.refusal = o
	}
	switch {
	case v == verdictDone || !whole:
		if x.headOut {
			return verdictBroken, o, false
		}
		ans.Body = &rest{Reader: io.MultiReader(bytes.NewReader(s.body), ans.Body), Closer: ans.Body}
		return 0, 0, true
	case v == verdictFailed && !x.idempotent && !x.headOut:
		ans.Body = &rest{Reader: bytes.NewReader(s.body), Closer: ans.Body}
		return 0, 0, true
	}
	if v != verdictCut && v != verdictNoConnect && v != verdictTimeout {
		x.saved = s
	}
	return v, o, false
}

// rest is a body of which a part was read already.
type rest struct {
	io.Reader
	io.Closer
}

// keep reads an error answer's body, up to a limit.
func (x *exchange) keep(ans *Answer, fromAgent bool) (s *answer, whole bool) {
	b, err := io.ReadAll(io.LimitReader(ans.Body, savedBody+1))
	s = &answer{head: ans.Head, body: b, fromAgent: fromAgent}
	ans.Recycle = nil
	return s, err == nil && len(b) <= savedBody
}

// classifyError says what an error answer means. verdictDone = pass it on.
func (x *exchange) classifyError(a *attempt, s *answer, reason string) (verdict, routing.Outcome) {
	if reason != "" {
		x.req.Full = x.req.Full || reason == errAllFull.Reason || reason == errQueueFull.Reason || reason == errLongWait.Reason
		return classifyRefusal(reason)
	}
	class := ReplyOther
	if x.p.cfg.Reply != nil {
		kind := a.peer.Member().Engine
		if a.self && x.p.cfg.EngineKind != nil {
			kind = x.p.cfg.EngineKind()
		}
		class = x.p.cfg.Reply(kind, s.head.Status, s.body)
	}
	if class == ReplyOther && (s.head.Status == 429 || s.head.Status == 503) {
		class = ReplyBusy
	}
	switch class {
	case ReplyBusy:
		if d := retryAfter(s.head.Header); d > 0 {
			a.peer.HoldOff(d, time.Now())
		}
		return verdictBusy, routing.OutcomeBusy
	case ReplyNotRun:
		return verdictBusy, routing.OutcomeBusy
	case ReplyDead:
		return verdictError, routing.OutcomeServerError
	}
	if s.head.Status >= 500 {
		return verdictFailed, routing.OutcomeServerError
	}
	return verdictDone, routing.OutcomeClientError
}

// retryAfter is how long an answer asks to wait; 0 = it does not say, or names a date.
func retryAfter(h Header) time.Duration {
	n, err := strconv.Atoi(strings.TrimSpace(h.Get("retry-after")))
	if err != nil || n < 0 {
		return 0
	}
	return time.Duration(min(n, 3600)) * time.Second
}

// classifyRefusal says what an error of a peer's agent means for its entry.
func classifyRefusal(reason string) (verdict, routing.Outcome) {
	switch reason {
	case errEngineRefused.Reason:
		return verdictNoConnect, routing.OutcomeRefused
	case errEngineCut.Reason, errBroken.Reason:
		return verdictCut, routing.OutcomeReset
	case errFirstByte.Reason, errDeadline.Reason:
		return verdictTimeout, routing.OutcomeTimeout
	case errTooManyRequests.Reason, errBodyMemory.Reason:
		return verdictRefused, routing.OutcomeBusy
	case errAllFull.Reason, errQueueFull.Reason, errLongWait.Reason, // its record, which comes with it, says for whom
		errBusier.Reason, errDraining.Reason, errNoneUsable.Reason, errLoop.Reason, errPathNotAllowed.Reason:
		return verdictRefused, routing.OutcomeCancelled
	case errQueueTimeout.Reason:
		return verdictDone, routing.OutcomeCancelled // it has waited long enough
	}
	return verdictDone, routing.OutcomeClientError
}

// passSaved passes on the newest refusal unchanged.
func (x *exchange) passSaved() {
	s := x.saved
	h := s.head
	h.Length, h.Trailer = int64(len(s.body)), nil
	x.finishHead(&h)
	if err := x.down.Head(&h, len(s.body) == 0); err == nil && len(s.body) > 0 {
		_ = x.down.Write(s.body) // the client is gone; nothing to tell it
	}
	_ = x.down.Finish(nil)
}
