package proxy

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Buffers of the relay. Most streams carry small events; a body that fills the small one gets the large one.
const (
	smallPiece = 4 << 10
	largePiece = 32 << 10
	// largeDocument is the longest answer that is not streamed and is passed on as a whole.
	largeDocument = 1 << 20
)

var (
	smallPieces = sync.Pool{New: func() any { b := make([]byte, smallPiece); return &b }}
	largePieces = sync.Pool{New: func() any { b := make([]byte, largePiece); return &b }}
)

func putPiece(pb *[]byte) {
	switch {
	case pb == nil:
	case len(*pb) == smallPiece:
		smallPieces.Put(pb)
	default:
		largePieces.Put(pb)
	}
}

// relay passes an answer on: each piece at once, its bytes unchanged. The entry agent holds back what would make a
// broken answer look whole; a target passes everything on and only counts.
func (x *exchange) relay(ctx context.Context, a *attempt, w *watch, ans *Answer) (verdict, routing.Outcome) {
	h := &ans.Head
	format := replyFormatOf(h.Header.Get("content-type"), h.Header.Get("content-encoding"))
	events := format == formatEvents && h.Status == 200
	x.begun = false
	if events {
		x.mayContinue(a)
	}
	x.sift.scan.wantID = x.class.makes()
	x.sift.start(format)
	x.counted = 0
	bodiless := x.in.Method == methodHead || h.Status == 204 || h.Status == 304 || h.Length == 0
	if h.Length < 0 && !bodiless && !h.Header.Has("x-accel-buffering") {
		h.Header.Add("x-accel-buffering", "no")
	}
	// A declared length means that the engine has the whole answer: its head goes with the first piece, and until then
	// another answer can take its place.
	late := h.Length > 0 && !bodiless
	if !late && !x.sendHead(h, events) {
		return x.stopped(), routing.OutcomeCancelled
	}
	if bodiless {
		return x.whole(a, ans, routing.OutcomeOK)
	}

	pool := &smallPieces
	if h.Length > smallPiece {
		pool = &largePieces
	}
	if x.role == roleEntry && late && format == formatJSON && h.Status == 200 && h.Length <= largeDocument {
		if h.Length > largePiece {
			return x.document(ctx, a, w, ans, make([]byte, h.Length))
		}
		pb := pool.Get().(*[]byte)
		defer pool.Put(pb)
		return x.document(ctx, a, w, ans, (*pb)[:h.Length])
	}
	var m *pump
	if b, ok := ans.Body.(*wireBody); ok && events && !late && !x.goesOn() {
		m = x.pumped(a, b)
	}
	return x.pieces(ctx, a, w, ans, pool, events, late, m)
}

// shed lets go of what only the beginning of an answer needs.
func (x *exchange) shed() {
	if x.out != nil {
		x.out.rest()
		outgoings.Put(x.out)
		x.out = nil
	}
	if x.bodyless { // nothing is sent again
		x.header = nil
	}
	x.pump.shed()
}

// relayOn goes on with the stream of an exchange that was parked; err is how the set's reading ended.
func (x *exchange) relayOn(err error) (verdict, routing.Outcome) {
	m := &x.pump
	if v, o, over := m.settle(err); over {
		return v, o
	}
	return x.pieces(&m.a.life, m.a, x.watch, m.a.ans, &smallPieces, true, false, m)
}

// pieces relays the body's pieces to its end, or until m takes the stream over. late means that the head is still to be sent.
func (x *exchange) pieces(ctx context.Context, a *attempt, w *watch, ans *Answer, pool *sync.Pool, events, late bool, m *pump) (verdict, routing.Outcome) {
	h := &ans.Head
	lender, _ := ans.Body.(*wireBody)
	var pb *[]byte
	defer func() { putPiece(pb) }()
	for {
		var (
			n   int
			err error
		)
		if lender != nil {
			putPiece(pb)
			pb = nil
			if m.takes() {
				x.shed()
				x.parked = true
				return verdictParked, 0
			}
			pb, n, err = lender.lend(pool)
		} else {
			if pb == nil {
				pb = pool.Get().(*[]byte)
			}
			n, err = ans.Body.Read(*pb)
		}
		if n > 0 {
			if late {
				if late = false; !x.sendHead(h, events) {
					return x.stopped(), routing.OutcomeCancelled
				}
			}
			now := time.Now()
			pass, progress, stop := x.piece(a, w, (*pb)[:n], events, now)
			if events {
				x.count(a, now)
			}
			if x.goesOn() {
				pass = x.cont.rewrite(pass)
			}
			if len(pass) > 0 {
				at := w.pause()
				werr := x.down.Write(pass)
				w.resume(at, progress)
				if werr != nil {
					return x.stopped(), routing.OutcomeCancelled
				}
				x.p.metrics.bytesOut.Add(uint64(len(pass)))
			} else if progress {
				w.progress()
			}
			if stop {
				return x.gaveUp()
			}
			if n == smallPiece && pool == &smallPieces {
				putPiece(pb)
				pb, pool = nil, &largePieces
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			return x.ended(a, ans, events)
		case events && x.sift.scan.seen()&eventDone != 0 && x.sift.scan.atBoundary() && ctx.Err() == nil:
			return x.ended(a, ans, events) // the end marker is out: the connection died behind a whole answer
		default:
			return x.broke(ctx)
		}
	}
}

// sendHead passes the answer's head on, unless an earlier attempt's is out already.
func (x *exchange) sendHead(h *ResponseHead, events bool) bool {
	if x.headOut {
		return true
	}
	x.stream = events
	x.finishHead(h)
	return x.down.Head(h, h.Length <= 0 || x.in.Method == methodHead) == nil
}

// document passes on a short answer that is not streamed, as a whole: one that is cut, or in which the engine says that
// it gave up, has not reached the client and may be replaced.
func (x *exchange) document(ctx context.Context, a *attempt, w *watch, ans *Answer, p []byte) (verdict, routing.Outcome) {
	if _, err := io.ReadFull(ans.Body, p); err != nil {
		return x.broke(ctx)
	}
	if s := &x.sift; (s.scan.scanAll(p)|s.scan.finish())&eventAbort != 0 {
		return verdictError, routing.OutcomeCancelled
	}
	if b, ok := ans.Body.(*wireBody); ok {
		ans.Head.Now = b.now()
	} else {
		ans.Head.Now = time.Now()
	}
	x.content, x.begun = true, true
	a.predicted(ans.Head.Now)              // it came at once: nothing is learned about the prefill
	a.end(routing.OutcomeOK, ans.Head.Now) // the replica is done with it, however long the client takes
	if !x.sendHead(&ans.Head, false) {
		return x.stopped(), routing.OutcomeCancelled
	}
	if x.down.Write(p) != nil {
		return x.stopped(), routing.OutcomeCancelled
	}
	x.p.metrics.bytesOut.Add(uint64(len(p)))
	_, _ = ans.Body.Read(p[:1]) // sees the end, so that the upstream keeps the connection
	return x.whole(a, ans, routing.OutcomeOK)
}

// piece looks at one piece of the body: what of it may go out, whether it is progress, and whether the engine gave up.
func (x *exchange) piece(a *attempt, w *watch, p []byte, events bool, now time.Time) (pass []byte, progress, stop bool) {
	s := &x.sift
	var ev replyEvent
	switch {
	case !events:
		if s.scan.scanAll(p)&eventAbort != 0 && x.role == roleEntry && s.scan.format == formatJSON {
			return nil, false, true // what is out stays short of the length, or of its end
		}
		if !x.content {
			x.firstContent(a, w, false, now)
		}
		return p, true, false
	case x.role == roleTarget:
		pass, ev = p, s.scan.scanAll(p)
	default:
		pass, ev, stop = s.push(p, x.content)
	}
	if ev&eventContent != 0 && !x.begun && (!stop || s.tokens > 0) {
		x.firstContent(a, w, true, now)
	}
	return pass, ev&eventData != 0, stop
}

// count tells the account of the content that it has not been told of; the newest came at now.
func (x *exchange) count(a *attempt, now time.Time) {
	if n := x.sift.scan.tokens - x.counted; n > 0 && a.flight != nil {
		a.flight.content(n, now)
	}
	x.counted = x.sift.scan.tokens
}

// firstContent notes that the answer has begun: from now on it cannot be replayed, and silence has the shorter limit.
func (x *exchange) firstContent(a *attempt, w *watch, token bool, now time.Time) {
	x.content, x.begun = true, true
	if !x.mayGoOn && !x.bodyless {
		x.bodyless = true
		x.body.drop()
	}
	if token {
		if x.firstAt.IsZero() {
			x.firstAt = now
		}
		a.firstToken(now)
	} else {
		a.predicted(now) // the whole answer comes at once: nothing is learned about the prefill
	}
	w.set(x.idle, errCauseIdle, now)
}

// ended judges an answer whose body came to its regular end.
func (x *exchange) ended(a *attempt, ans *Answer, events bool) (verdict, routing.Outcome) {
	s := &x.sift
	s.scan.finish()
	if !events {
		return x.whole(a, ans, routing.OutcomeOK)
	}
	if x.role == roleEntry && x.strict() && s.scan.seen()&(eventFinish|eventDone|eventError) == 0 &&
		(s.scan.hasID || s.scan.events == 0) {
		// A 200 stream that ends without a finish reason was cut by an engine that closed cleanly.
		if x.content {
			return x.broken(verdictBroken, continueReset), routing.OutcomeMalformed
		}
		return verdictCut, routing.OutcomeMalformed
	}
	if t := s.tail(); x.role == roleEntry && len(t) > 0 {
		if x.down.Write(t) != nil {
			return x.stopped(), routing.OutcomeCancelled
		}
	}
	if s.scan.seen()&eventError != 0 {
		x.outcome = outcomeStreamError
		o := routing.OutcomeServerError
		if s.clientError() {
			o = routing.OutcomeClientError
		}
		return x.whole(a, ans, o)
	}
	return x.whole(a, ans, routing.OutcomeOK)
}

// strict reports whether the path's streams are known to end with a finish reason or an end marker.
func (x *exchange) strict() bool {
	switch x.class.Route {
	case "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses":
		return true
	}
	return false
}

// whole ends an answer that is complete.
func (x *exchange) whole(a *attempt, ans *Answer, o routing.Outcome) (verdict, routing.Outcome) {
	u := &x.sift.scan.usage
	m := x.p.metrics
	m.outputTokens.Add(uint64(u.Completion.Or(x.sift.scan.tokens)))
	m.cachedTokens.Add(uint64(u.Cached.Or(0)))
	x.evidence(a, u)
	if a.flight != nil && u.Completion.OK && x.peek.N <= 1 {
		a.flight.told(u.Completion.V, x.sift.scan.tokens)
	}
	x.made(a, ans.Head.Status)
	if ans.Head.Status == 200 && o == routing.OutcomeOK && !x.goesOn() {
		r, first := x.p.lessons.note(x.req.Model, &x.peek, u)
		if first && max(r.V/defaultPerToken, defaultPerToken/r.V) > otherUnit {
			x.p.account.forgetRate()
		}
	}
	trailer := ans.Trailer()
	cleanTrailer(&trailer)
	if x.down.Finish(trailer) != nil {
		return x.stopped(), routing.OutcomeCancelled
	}
	switch {
	case o != routing.OutcomeOK:
	case a.refusal != routing.OutcomeOK: // its status is not the engine's
		o = a.refusal
	default:
		o = statusOutcome(ans.Head.Status)
	}
	return verdictDone, o
}

// statusOutcome is the outcome of a whole answer for the replica's books.
func statusOutcome(status int) routing.Outcome {
	switch {
	case status == 429 || status == 503:
		return routing.OutcomeBusy
	case status == 500 || status == 502 || status == 504:
		return routing.OutcomeServerError
	case status >= 400:
		return routing.OutcomeClientError
	}
	return routing.OutcomeOK
}

// gaveUp is the end of a stream in which the engine said that it gave up: an abort, or an error before any content.
func (x *exchange) gaveUp() (verdict, routing.Outcome) {
	v, o, reason := verdictError, routing.OutcomeServerError, continueError
	if x.sift.scan.seen()&eventError == 0 {
		v, o, reason = verdictBroken, routing.OutcomeCancelled, continueAbort // announced: the engine is being stopped
	}
	if x.content {
		return x.broken(v, reason), o
	}
	return verdictError, o
}

// broke is an answer whose body ended early.
func (x *exchange) broke(ctx context.Context) (verdict, routing.Outcome) {
	cause := context.Cause(ctx)
	switch {
	case x.ctx.Err() != nil:
		return x.stopped(), routing.OutcomeCancelled
	case x.role == roleTarget && errors.Is(cause, errCauseDrain):
		x.fail(errDraining)
		x.outcome = outcomeCut
		return verdictDone, routing.OutcomeCancelled
	case errors.Is(cause, errCauseDrain):
		if x.content || x.headOut && !x.stream {
			return x.broken(verdictBroken, continueDrain), routing.OutcomeCancelled
		}
		return verdictCut, routing.OutcomeCancelled
	case errors.Is(cause, errCauseFirst) && x.goesOn():
		return x.broken(verdictBroken, continueHang), routing.OutcomeTimeout
	case errors.Is(cause, errCauseFirst) && !x.headOut:
		return verdictTimeout, routing.OutcomeTimeout
	case errors.Is(cause, errCauseFirst):
		x.outcome = outcomeTimeout
		x.endBroken(errFirstByte)
		return verdictDone, routing.OutcomeTimeout
	case errors.Is(cause, errCauseIdle):
		v := x.broken(verdictBroken, continueHang)
		if v == verdictDone {
			x.outcome = outcomeTimeout
		}
		return v, routing.OutcomeTimeout
	case errors.Is(x.body.failure(), errBodyTooLarge):
		x.fail(errTooLarge)
		return verdictDone, routing.OutcomeCancelled
	case x.content || x.headOut && !x.stream:
		reason := continueReset
		if errors.Is(cause, errCauseEngine) {
			reason = continueHang
		}
		return x.broken(verdictBroken, reason), routing.OutcomeReset
	}
	return verdictCut, routing.OutcomeReset
}

// breakOff ends an answer that has begun and cannot be made whole.
func (x *exchange) breakOff(v verdict) verdict {
	if x.outcome == "" {
		x.outcome = outcomeCut
	}
	if v == verdictError && len(x.sift.bad) > 0 && x.sift.scan.seen()&eventError != 0 {
		x.outcome = outcomeStreamError
		_ = x.down.Write(x.sift.bad) // the engine's own words are better than ours
		x.down.Abort()
		return verdictDone
	}
	x.endBroken(errStreamBroken)
	return verdictDone
}

// endBroken ends an answer behind its head: with an error event where one can stand, and never as a whole one.
func (x *exchange) endBroken(e *apiError) {
	x.log.Warn("answer broken off", "id", x.id, "node", x.node(), "reason", e.Reason, "content", x.content)
	if x.stream && x.role == roleEntry && x.sift.scan.format == formatEvents {
		_ = x.down.Write(x.errorEvent(e)) // the client is gone; nothing to tell it
	}
	x.down.Abort()
}

// errorEvent is an error in the shape that the path's clients look for.
func (x *exchange) errorEvent(e *apiError) []byte {
	b := e.Event()
	if strings.HasSuffix(x.class.Route, "/messages") {
		b = append([]byte("event: error\n"), b...)
	}
	return b
}

func (x *exchange) node() string {
	if x.attempt == nil {
		return ""
	}
	return x.attempt.Node
}
