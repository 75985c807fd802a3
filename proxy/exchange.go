package proxy

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	mathrand "math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/h1"
	"github.com/grapevine-lb/grapevine/routing"
)

// role is which end of a request's path this agent is.
type role uint8

const (
	roleEntry  role = iota // the request came from a client: choose, forward, retry
	roleTarget             // it came from the entry agent: our own engine, no retry, no judgement
)

func (r role) String() string { return [...]string{"entry", "target"}[r] }

// exchange is one request from its head to its end. One goroutine owns it.
type exchange struct {
	// What each chunk of a stream needs stands together: its memory is cold when the chunk comes.
	pump    pump
	p       *Proxy
	watch   *watch // of the attempt under way
	role    role
	content bool // content went out, or part of a body
	begun   bool // content of the attempt under way went out
	counted int  // pieces of content of that attempt that the account knows
	sift    sift

	keyed bool // by access
	in    *RequestHead
	down  Downstream
	rnd   *mathrand.Rand
	log   *slog.Logger
	class pathClass
	path  string // raw, without the query

	id       string    // request id
	header   Header    // cleaned fields, as they go on
	out      *Outgoing // the newest attempt's; nil = none
	access   Access    // of the client's key
	held     bool      // others have seen it in the gate's queue
	body     *body
	bodyless bool // the body was let go of: it cannot be sent again
	peek     Peek
	req      routing.Request
	units    uint32 // of its tokens, account.units
	grpc     bool

	arrived time.Time
	life    *life
	ctx     context.Context // life, or within it
	first   time.Duration   // most time to the first content; 0 or less = no limit
	idle    time.Duration   // most silence after it; likewise

	spare *attempt // memory of the next one; nil = none
	lent  bool     // others may still have an attempt, or the body

	// What was tried.
	retry      retryState
	tried      []uint64
	tries      [maxRetries + 1 + maxRefusals]uint64
	idempotent bool
	deaths     int     // replicas that died with this request in their prefill
	saved      *answer // newest refusal, to be passed on if nobody does better
	askNote    askNote // of the newest pick

	// How it waits and moves, see stage.go.
	hold    hold
	ticket  uint64        // of the thief that it goes to
	fixed   bool          // it may not be given away (again)
	moved   leave         // where the newest attempt's target says that it went
	moves   int           // how often
	limit   time.Duration // what it may cost at the target when it gets there; 0 = any
	turned  bool          // a target refused for that: the next one may not
	pinned  bool          // it needs an object that one replica keeps
	refused *apiError     // by our own gate

	gatewayPort string // of the client listeners, as the trusted gateway has it that chose the replica; "" = none did

	shadowed shadowNote // what shadow mode says of it
	trace    *traced    // nil = nobody traces

	// What the client has got.
	headOut  bool
	stream   bool            // the head that went out was a 200 event stream
	mayGoOn  bool            // a broken stream may go on elsewhere, as far as the request goes
	openTurn bool            // the engine of the first leg took the client's last message for an open turn
	cont     *continuation   // nil = it has not broken
	leg      routing.Outcome // of the newest attempt
	parked   bool            // the set reads the stream; no goroutine is here until resume
	unlimit  func()          // ends the deadline that the client set; nil = there is none

	firstAt time.Time
	over    time.Time // when the newest attempt was over
	status  int
	outcome string
	attempt *PickAttempt
	rec     pickNote
}

// exchange returns the exchange of a new request: serve is to be called, and recycle when nobody can end its life any more.
func (p *Proxy) exchange() *exchange {
	x := p.exchanges.Get().(*exchange)
	x.p = p
	if x.life == nil {
		x.life = new(life)
	}
	if x.body == nil {
		x.body = new(body)
	}
	return x
}

// serve runs one request from its head to its end, or until its stream needs no goroutine: then it is parked, and resume is to be
// called.
func (x *exchange) serve(r role, in *RequestHead, src io.Reader, down Downstream) {
	p, l := x.p, x.life
	if src != nil {
		// A request with a body is none for an upgrade (RFC 6455 4.1: a GET, which has none): behind an upgrade's head the
		// bytes go as they are, so to an engine that declines it a body would be the next request.
		in.Upgrade = ""
	}
	n := p.inflight.Add(1)
	p.lives.add(l)

	x.role, x.in, x.down, x.ctx, x.arrived, x.log = r, in, down, l, time.Now(), p.log
	x.tried = x.tries[:0]
	x.body.begin(src, p.cfg.MaxBody, p.cfg.KeepBody, p.bodies)
	defer x.leave()
	x.path, _, _ = strings.Cut(in.Target, "?")
	x.class = classify(in.Method, x.path)
	x.id = x.requestID()
	if p.cfg.Tracing != nil {
		x.startTrace()
	}
	if e := x.admit(int(n)); e != nil {
		x.fail(e)
		return
	}
	x.run()
}

// resume goes on with a parked exchange: something is to be waited for or decided. It may be parked again.
func (x *exchange) resume(readErr error) {
	x.parked = false
	defer x.leave()
	a := x.pump.a
	peer := a.peer
	v, o := x.relayOn(readErr)
	x.sent(a)
	if v = x.endTry(a, v, o); x.role == roleTarget {
		x.served(v)
	} else {
		x.goAfter(v, choice{Peer: peer})
	}
}

// leave undoes what serve did, when the exchange is over.
func (x *exchange) leave() {
	if x.parked {
		return
	}
	if x.unlimit != nil {
		x.unlimit()
	}
	p := x.p
	x.over = x.account()
	if !x.bodyless {
		x.body.release()
	}
	x.life.end(errCauseDone)
	p.lives.remove(x.life)
	p.inflight.Add(-1)
}

// recycle makes x ready for another request and keeps its memory; what was held or saved stays with those who may
// still look at it, and so does what was lent.
func (x *exchange) recycle() {
	if x.held {
		return
	}
	clear(x.header)
	if x.out != nil {
		x.out.rest()
	}
	s := &x.sift
	if cap(s.held)+cap(s.out)+cap(s.scan.plain) > largePiece {
		s.held, s.out, s.scan.plain = nil, nil, nil
	}
	p, rnd, header, out, attempts := x.p, x.rnd, x.header[:0], x.out, x.rec.Attempts[:0]
	held, rest, plain, form := s.held[:0], s.out[:0], s.scan.plain[:0], s.scan.shape.form[:0]
	l, spare, b, prefix, ends := x.life.renewed(), x.spare, x.body, x.peek.Prefix[:0], x.peek.Ends[:0]
	if x.lent || x.cont != nil {
		b = nil
	}
	*x = exchange{}
	x.life, x.spare, x.body, x.peek.Prefix, x.peek.Ends = l, spare, b.renewed(), prefix, ends
	x.rnd, x.header, x.out, x.rec.Attempts = rnd, header, out, attempts
	x.sift.held, x.sift.out, x.sift.scan.plain, x.sift.scan.shape.form = held, rest, plain, form
	p.exchanges.Put(x)
}

// admit refuses what can be refused before the body is read.
func (x *exchange) admit(inflight int) *apiError {
	p := x.p
	switch {
	case x.in.Method == "CONNECT" || x.in.Method == "TRACE": // h1 refuses them as it reads; here they come over HTTP/2
		return errMethod
	case x.in.HTTP2 && !h1.Fits(x.in.Method, x.in.Target, x.in.Host):
		return errBadRequest
	case p.cfg.MaxInflight > 0 && inflight > p.cfg.MaxInflight:
		return errTooManyRequests
	case x.in.Length > p.cfg.MaxBody:
		return errTooLarge
	case x.role == roleTarget:
		return x.admitHop()
	}
	if e := x.admitClient(); e != nil {
		return e
	}
	switch {
	case !x.class.passes(x.path, p.allow):
		return errPathNotAllowed
	}
	return nil
}

// admitHop checks that a request between agents has come from one entry, and from another than ourselves.
func (x *exchange) admitHop() *apiError {
	boot, ok := parseBoot(x.in.Header.Get(headerHop))
	switch {
	case !ok || boot == x.p.self || x.in.Header.Count(headerHop) != 1:
		return errLoop
	case x.in.Peer != 0 && x.in.Peer != boot:
		return errForgedHop
	case x.class.Kind == pathAdmin:
		return errPathNotAllowed // these stay at the agent where they were asked for
	case x.p.draining.Load():
		return errDraining
	}
	return nil
}

// run reads the body and has the request answered.
func (x *exchange) run() {
	p := x.p
	if x.class.Kind == pathModels && x.serveModels() {
		return
	}
	x.header = cleanRequest(x.header, x.in, x.role == roleTarget)
	x.forgetKey()
	x.grpc = x.in.HTTP2 && isGRPC(x.in.Header)
	if e := x.allFull(); e != nil {
		if x.in.Length >= 0 && x.in.Length <= keepAlways { // taken in, so that the connection can go on
			_ = x.body.fill(x.ctx, x.in.Length, func([]byte) {}, func() bool { return false }) // who is gone reads no answer either
		}
		x.fail(e)
		return
	}
	if !x.read() {
		return
	}
	x.header.Set(headerRequestID, x.id)
	x.idempotent = x.header.Has("idempotency-key")
	x.fillRequest()
	x.setLimits()
	if x.role == roleTarget {
		x.readMoveFields()
		x.serveTarget()
		return
	}
	forwarded(&x.header, x.in)
	if p.deadly.has(x.in.Target, x.body, x.arrived) {
		x.fail(errDeadly)
		return
	}
	x.serveEntry()
}

// read takes the body in before anything is sent on: forwarding while reading lets an engine's early answer cut the
// exchange, and only a whole body can be chosen for and sent again. gRPC and upgrades are two-way from the start and
// go through.
func (x *exchange) read() bool {
	if x.grpc || x.in.Upgrade != "" || x.body.eof {
		return true
	}
	k := NewPeeker(x.class.Service, x.in.Header.Get("content-type"), x.in.Header.Get("content-encoding"), x.p.cfg.Salt)
	defer k.Close()
	k.peek.Prefix, k.peek.Ends = x.peek.Prefix, x.peek.Ends // memory
	err := x.body.fill(x.ctx, x.in.Length, func(b []byte) { _, _ = k.Write(b) }, func() bool { return !k.peek.HasModel })
	switch {
	case errors.Is(err, errBodyTooLarge):
		x.fail(errTooLarge)
		return false
	case err != nil:
		if cause := context.Cause(x.ctx); errors.Is(cause, errCauseDrain) {
			x.fail(errDraining)
		} else if x.ctx.Err() != nil || errors.Is(err, io.ErrUnexpectedEOF) {
			x.gone()
		} else {
			x.fail(errBadRequest) // framing that the listener refused; a client that is still there reads why
			x.outcome = outcomeClientError
		}
		return false
	}
	x.peek, err = k.Done()
	if err != nil && !x.peek.HasModel {
		x.p.metrics.unreadable.Add(1)
	}
	if !x.body.eof && !x.peek.HasModel && x.class.Service != 0 && x.body.n < x.p.cfg.MaxBody {
		if x.ctx.Err() != nil {
			x.stopped()
		} else {
			x.fail(errBodyMemory) // the budget of all bodies is used up before the model was seen
		}
		return false
	}
	return true
}

// fillRequest turns what was seen into what a pick needs.
func (x *exchange) fillRequest() {
	k := &x.peek
	model := k.Model
	if !k.HasModel {
		model = queryModel(x.in.Target)
	}
	x.units = x.p.account.units.Load()
	tokens := x.p.lessons.tokens(model, k)
	x.req = routing.Request{
		Model: model, Service: x.class.Service, PromptTokens: tokens, MaxTokens: k.MaxTokens,
		Prefix: k.Prefix, Ends: k.ends(tokens), Class: x.priority(),
		Local: x.class.Kind == pathAdmin || x.class.Kind == pathStateful || x.class.Kind == pathUnknown,
	}
	if k.MaxTokens > 0 && k.N > 1 {
		x.req.MaxTokens *= k.N
	}
	session := x.header.Get(headerSession)
	if session == "" {
		session = k.Session
	}
	if session == "" {
		session = x.header.Get("x-session-id")
	}
	if x.p.cfg.NoPrefix {
		x.req.Prefix, x.req.Ends = nil, nil
	}
	if session != "" && x.p.cfg.Salt != nil && !x.p.cfg.NoSession {
		x.req.Session = x.p.cfg.Salt.Session(session)
	}
	x.tellClass()
	x.rec.PromptTokens = tokens
}

// priority is the request's class: 1 is the highest, 2 the default.
func (x *exchange) priority() uint8 { return x.askedClass() }

// queryModel is the model that a request without a body names, as the realtime API does.
func queryModel(target string) string {
	_, q, ok := strings.Cut(target, "?")
	if !ok || !strings.Contains(q, "model=") {
		return ""
	}
	v, _ := url.ParseQuery(q)
	return strings.Clone(v.Get("model")) // it outlives the request's head
}

// requestID keeps the client's id, or makes one.
func (x *exchange) requestID() string {
	if id := x.in.Header.Get(headerRequestID); validRequestID(id) {
		return strings.Clone(id) // it outlives the request's head in the log of picks
	}
	b := append(make([]byte, 0, 27), "gv-"...)
	b = hex.AppendEncode(b, binary.BigEndian.AppendUint64(make([]byte, 0, 8), x.rnd.Uint64()))
	b = hex.AppendEncode(b, binary.BigEndian.AppendUint32(make([]byte, 0, 4), x.rnd.Uint32()))
	return string(b)
}

// serveTarget gives the request to our own engine, once, and says honestly how it went: the entry agent decides.
func (x *exchange) serveTarget() {
	self := x.p.cfg.Table.Self()
	x.served(x.try(&choice{Peer: self, Reason: routing.ReasonSelf}))
}

// served ends a request of another agent, whose only attempt came to v.
func (x *exchange) served(v verdict) {
	switch v {
	case verdictDone, verdictGone, verdictParked:
	default:
		x.giveUp(v)
	}
}

// serveEntry picks, sends, and picks again for as long as the rules allow (design 6.7).
func (x *exchange) serveEntry() {
	p := x.p
	p.budget.first(x.arrived)
	x.trace.picking()
	d, settled := x.owner()
	if !settled {
		d, settled = x.chosen()
	}
	if !settled {
		d = x.pick()
	}
	if d.Peer == nil {
		x.nobody(d.Reason)
		return
	}
	x.goAfter(x.try(&d), d)
}

// goAfter does what is to be done after the newest attempt, which was at d and came to v.
func (x *exchange) goAfter(v verdict, d choice) {
	p := x.p
	for ; ; v = x.try(&d) {
		switch v {
		case verdictDone, verdictGone, verdictParked:
			return
		case verdictResume:
			x.goOn(d)
			return
		}
		if v == verdictMoved {
			// Neither an attempt nor charged, and the replica counts as untried.
			if x.moves++; x.moves > maxMoves || !x.body.again() {
				x.giveUp(v)
				return
			}
			if d = x.after(); d.Peer == nil {
				x.giveUp(v)
				return
			}
			continue
		}
		x.tried = append(x.tried, d.Peer.Boot())
		if x.deaths >= deadlyDeaths {
			p.deadly.add(x.in.Target, x.body, time.Now())
			x.fail(errDeadly)
			x.outcome = outcomeDeadly
			return
		}
		var home bool
		if d, home = x.home(v); !home {
			d = x.pick()
		}
		if d.Peer == nil || !x.body.again() || x.class.Kind == pathStateful || x.pinned {
			x.giveUp(v)
			return
		}
		budget := p.budget
		if home {
			budget = nil
		}
		reason, ok := x.retry.allow(v, x.idempotent, budget, time.Now())
		if !ok || len(x.tried) == cap(x.tried) {
			x.giveUp(v)
			return
		}
		p.metrics.retries.add(reason)
		if x.retry.wait(x.ctx, v, x.rnd) != nil {
			x.stopped()
			return
		}
		d.at = time.Time{} // we have waited
	}
}

// choice is what an exchange keeps of a decision: with its lists of whom to ask, each stream's stack would be twice as large.
type choice struct {
	at            time.Time     // when it was made, as long as nobody has waited since; zero = look
	Peer          *routing.Peer // nil: none, Reason says why
	Score         float64       // seconds
	First         float64       // seconds until its first token; 0 = nobody predicted it
	Tokens        int           // prompt tokens that it must compute
	Reason        routing.Reason
	RunnerUp      *routing.Peer // nil = there was none
	RunnerUpScore float64       // seconds
}

// pick asks the policy for a replica that was not tried.
func (x *exchange) pick() choice {
	p := x.p
	x.req.Tried = x.tried
	x.trace.picking()
	s := p.cfg.Table.Snapshot()
	x.rec.Candidates = len(s.Peers())
	if x.req.Local {
		if slices.Contains(x.tried, p.self) {
			return choice{Reason: routing.ReasonAllTried}
		}
		return choice{Peer: s.Self(), Reason: routing.ReasonOnly}
	}
	now := time.Now()
	d := p.cfg.Policy.Pick(s, &x.req, now, x.rnd)
	x.askNote, x.ticket, x.limit = askNote{}, 0, 0
	if p.shadow.on.Load() {
		return x.shadowPick(s, &d, now)
	}
	if d.Asks > 0 {
		x.ask(&d)
		now = time.Time{}
		if !x.turned {
			x.limit = time.Duration(d.Limit() * 1e9)
		}
	}
	if d.Peer == nil && p.draining.Load() && d.Reason == routing.ReasonNoneUsable && !slices.Contains(x.tried, p.self) {
		return choice{Peer: s.Self(), Reason: routing.ReasonOnly} // the last one serves while its engine lives (C84)
	}
	return choice{at: now, Peer: d.Peer, Score: d.Score, First: d.First, Tokens: d.Tokens, Reason: d.Reason, RunnerUp: d.RunnerUp, RunnerUpScore: d.RunnerUpScore}
}

// home is the last chance of a request that reached nobody: when two could not be connected to, the network may be cut, and
// what is left of it is our own engine, if that can take the request. Nothing ran, so this is not charged to the budget.
func (x *exchange) home(v verdict) (choice, bool) {
	if v != verdictNoConnect || x.retry.retries != maxRetries-1 || x.p.shadow.on.Load() || slices.Contains(x.tried, x.p.self) {
		return choice{}, false
	}
	x.req.Tried = x.tried
	d := ownOnly.Pick(x.p.cfg.Table.Snapshot(), &x.req, time.Now(), x.rnd)
	if d.Peer == nil {
		return choice{}, false
	}
	x.askNote, x.ticket, x.limit = askNote{}, 0, 0
	return choice{Peer: d.Peer, Score: d.Score, First: d.First, Tokens: d.Tokens, Reason: d.Reason}, true
}

// ownOnly picks our own replica or nobody.
var ownOnly, _ = routing.NewPolicy("local") // it exists

// nobody answers a request for which no replica can be picked.
func (x *exchange) nobody(r routing.Reason) {
	x.trace.pick(x, r, nil, time.Now())
	switch r {
	case routing.ReasonUnknownModel:
		x.fail(errModelNotFound)
	case routing.ReasonNoModel:
		x.fail(errModelUnavailable)
	case routing.ReasonNoService:
		x.fail(errNoService)
	case routing.ReasonTooLong:
		x.fail(errTooLong)
	case routing.ReasonAllFull:
		x.fail(x.full(x.req.Class))
	default:
		if x.p.draining.Load() {
			x.fail(errDraining)
			return
		}
		x.fail(errNoneUsable)
	}
}

// giveUp ends a request whose last attempt came to v and that may not, or cannot, be tried again.
func (x *exchange) giveUp(v verdict) {
	switch {
	case x.headOut:
		x.breakOff(v)
	case x.refused != nil && (v == verdictRefused || v == verdictBusy) && x.saved == nil:
		x.fail(x.refused)
	case x.saved != nil && v != verdictCut && v != verdictTimeout:
		x.passSaved()
	case v == verdictTimeout:
		x.fail(errFirstByte)
		x.outcome = outcomeTimeout
	case v == verdictNoConnect && x.role == roleTarget:
		x.fail(errEngineRefused)
	case v == verdictNoConnect, v == verdictMoved:
		x.fail(errNoneUsable)
	case x.role == roleTarget:
		x.fail(errEngineCut)
	default:
		x.fail(errBroken)
	}
}

// Errors of a target towards the entry agent: what its engine did, so that the entry can apply its rules.
var (
	errEngineRefused = &apiError{Status: 503, Code: "engine_unreachable", Reason: "engine_refused", RetryAfter: time.Second,
		Message: "The replica's engine does not accept connections."}
	errEngineCut = &apiError{Status: 502, Code: "upstream_broken", Reason: "engine_cut",
		Message: "The replica's engine broke off before it answered."}
)

// fail answers with an error of our own, or, behind a head, ends the stream with it.
func (x *exchange) fail(e *apiError, more ...Field) {
	x.p.metrics.refusals.add(e.Reason)
	if x.outcome == "" {
		x.outcome = outcomeRefused
	}
	if x.headOut {
		x.endBroken(e)
		return
	}
	h := &ResponseHead{Status: e.Status}
	e.Headers(x.rnd.Float64(), h.Header.Add)
	b := e.Body()
	h.Header = append(h.Header, more...)
	h.Length = int64(len(b))
	if x.in.Method == methodHead {
		b = nil
	}
	x.finishHead(h)
	if x.down.Head(h, len(b) == 0) == nil && len(b) > 0 {
		_ = x.down.Write(b) // the client is gone; nothing to tell it
	}
	_ = x.down.Finish(nil)
}

// finishHead adds what every answer of ours carries and notes that the head goes out.
func (x *exchange) finishHead(h *ResponseHead) {
	if !h.Header.Has(headerRequestID) {
		h.Header.Add(headerRequestID, x.id)
	}
	if x.role == roleTarget && x.p.cfg.Record != nil {
		h.Header.Set(headerLoad, x.p.ourRecord.text(x.p.cfg.Record, h.Status >= 400))
	}
	x.headOut, x.status = true, h.Status
}

// gone ends an exchange whose client has hung up.
func (x *exchange) gone() {
	x.outcome = outcomeCancel
	x.down.Abort()
}

// stopped ends an exchange whose context is over: the client hung up, its deadline has passed, or the drain timeout
// has come.
func (x *exchange) stopped() verdict {
	switch cause := context.Cause(x.ctx); {
	case errors.Is(cause, errCauseDrain):
		x.fail(errDraining)
		x.outcome = outcomeCut
		return verdictDone
	case errors.Is(cause, errCauseDeadline):
		x.fail(errDeadline)
		x.outcome = outcomeTimeout
		return verdictDone
	}
	x.gone()
	return verdictGone
}

// account ends the request's books and says when it was over.
func (x *exchange) account() time.Time {
	m, now := x.p.metrics, x.over
	if now.IsZero() || x.refused != nil || x.outcome != "" { // more came behind the attempt
		now = time.Now()
	}
	if x.outcome == "" {
		x.outcome = outcomeOf(x.status)
	}
	if x.role == roleTarget {
		m.target.add(x.outcome)
	} else {
		m.entry.add(x.outcome)
		m.duration.observe(now.Sub(x.arrived))
		if !x.firstAt.IsZero() {
			m.ttft.observe(x.firstAt.Sub(x.arrived))
			x.p.shadow.seen(x.shadowed, x.firstAt.Sub(x.arrived))
		}
	}
	m.promptTokens.Add(uint64(x.sift.scan.usage.Prompt.Or(x.req.PromptTokens)))
	n := &x.rec
	r := PickRecord{
		At: x.arrived, ID: x.id, Role: x.role.String(), Route: x.class.Route, Model: x.req.Model, PromptTokens: n.PromptTokens,
		Candidates: n.Candidates, Attempts: n.Attempts, Outcome: x.outcome, Status: x.status, DurationMS: ms(now.Sub(x.arrived)),
		Trace: x.trace.id(), Shadow: n.Shadow, ShadowHereMS: n.ShadowHereMS, ShadowThereMS: n.ShadowThereMS,
	}
	if !x.firstAt.IsZero() {
		r.TTFTMS = ms(x.firstAt.Sub(x.arrived))
	}
	x.p.picks.add(&r)
	if level, ok := x.logged(); ok {
		log := x.log
		if r.Trace != "" {
			log = log.With("trace", r.Trace)
		}
		replica, usage := "", &x.sift.scan.usage
		if n := len(r.Attempts); n > 0 {
			replica = r.Attempts[n-1].Node
		}
		log.Log(x.ctx, level, "request", "id", x.id, "role", r.Role, "route", r.Route, "model", r.Model, "outcome", r.Outcome,
			"status", r.Status, "replica", replica, "attempts", len(r.Attempts), "input_tokens", usage.Prompt.Or(r.PromptTokens),
			"output_tokens", usage.Completion.Or(x.sift.tokens), "ttft_ms", r.TTFTMS, "duration_ms", r.DurationMS)
	}
	x.trace.finish(x, now)
	return now
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// outcomeOf is the outcome of an answer that was passed on whole.
func outcomeOf(status int) string {
	switch {
	case status == 429 || status == 503:
		return outcomeBusy
	case status >= 500:
		return outcomeServerError
	case status >= 400:
		return outcomeClientError
	}
	return outcomeOK
}
