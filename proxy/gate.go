package proxy

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/guard"
	"github.com/grapevine-lb/grapevine/routing"
)

// gateTurn is how often the gate looks by itself while somebody is held.
const gateTurn = 10 * time.Millisecond

// EngineView is what the newest reading of our own engine's pages says; what a page lacks stays unknown.
type EngineView struct {
	At               time.Time
	Running, Waiting routing.Opt[int]
	RunLimit         routing.Opt[int]     // most that it runs at once
	KVUsed           routing.Opt[float64] // 0..1
	KVCapacity       routing.Opt[int]     // tokens
	FirstTokens      routing.Opt[float64] // counter of first tokens
	Foreign          int                  // requests there that did not pass through us
}

// gate is the gate of our own engine: it holds requests at the agent while the engine could not start them now. There
// they can still be moved, ordered and counted, in the engine's own queue they cannot (design section 5.3). The
// decision itself is routing.Gate's. It is safe for concurrent use.
type gate struct {
	off     bool // never changes
	account *account
	limit   int           // requests held at most
	timeout time.Duration // longest wait of one of the default class, see patience
	onHeld  func()        // called when held goes from 0 to 1
	onDry   func()        // called when the engine could take more than we have

	mu      sync.Mutex
	queue   holdQueue
	inside  []*pass // at the engine without a first token, in the order of entry
	pending int     // their prompt tokens
	count   int     // at the engine, running ones included
	classes reserve // what slots are kept free by
	entered int     // tokens let in since the engine's view, for its KV space
	view    EngineView
	learned int     // requests that an engine which tells no limit can use at once; 0 = not known
	waited  bool    // … had some waiting at the reading before
	ended   int     // requests that it ended since
	pace    float64 // requests that it ends, /s
	turns   int     // requests that left the queue for the engine
	between float64 // mean time between two of them while others waited, s
	turned  time.Time
	refuses uint8   // classes that the record says are refused, from the lowest up
	unseen  float64 // first tokens that we saw and the engine's counter did not show yet
	tickets map[uint64]ticket
	timer   *time.Timer
	closed  bool

	metrics gateMetrics
	came    *atomic.Uint64 // counts valid tickets
}

// starts returns the lowest class of which the engine could start a short request now; 0 = of none. The lock is held.
func (g *gate) starts(rate float64, step time.Duration, now time.Time) uint8 {
	x := g.state(rate)
	x.Step = step.Seconds()
	for c := routing.ClassBatch; c >= routing.ClassPriority; c-- {
		x.Reserve = g.reserve(int(c-routing.ClassPriority), now)
		if x.Room(0, 0) {
			return c
		}
	}
	return 0
}

// gateMetrics counts what the gate did.
type gateMetrics struct {
	passed   atomic.Uint64 // let through at once
	held     atomic.Uint64 // held first
	waited   histogram     // of those held, until they went to the engine
	full     atomic.Uint64 // refused, the queue was full, or had to leave it for another
	shed     atomic.Uint64 // refused, the wait would have been too long
	timedOut atomic.Uint64
	drained  atomic.Uint64 // handed over by a drain
	stolen   atomic.Uint64 // given to a thief
}

// heldBounds are upper bounds of the histogram of waits, in seconds.
var heldBounds = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60}

// pass is a request's way through the gate: it is at the engine. Its methods may come in any order and more than once.
type pass struct {
	g       *gate
	tokens  int
	at      time.Time
	due     time.Time // from when on its prefill is taken as over, whatever the signals say
	blind   bool      // no first token will be seen
	line    int       // of its class
	pending bool
	inside  bool
}

// leave is why a request left the hold queue.
type leave struct {
	how    leaveHow
	pass   *pass  // leftAdmitted
	thief  uint64 // leftStolen: boot id
	ticket uint64 // leftStolen
}

type leaveHow uint8

const (
	leftAdmitted leaveHow = iota
	leftStolen            // an idle agent pulled it
	leftDrained           // we are draining: somebody else must take it
	leftBusier            // its target had become busier than it had said
	leftShed              // its place in the full queue went to another
)

// arrive lets h through (a pass), holds it (nil, nil: wait for h.ready), or refuses it. ticket passes once.
func (g *gate) arrive(h *hold, ticket uint64, now time.Time) (*pass, *apiError) {
	rate, step := g.account.speed()
	g.mu.Lock()
	g.classes.came(h.line(), now)
	invited := g.takeTicket(ticket, now)
	if g.off || g.closed || invited || g.next(h, now) && g.room(h, rate, step, now) {
		g.metrics.passed.Add(1)
		p := g.enter(h, rate, step, now)
		g.mu.Unlock()
		return p, nil
	}
	full, wait := g.refusal(h, rate, 1, now)
	switch {
	case wait > g.budget(h, now):
		g.mu.Unlock()
		g.metrics.shed.Add(1)
		return nil, errLongWait.with(errLongWait.Message, max(wait, time.Second))
	case full:
		out := g.queue.yields(h)
		if out == nil || g.queue.crowded(h, g.limit) {
			wait = g.drainsIn(rate)
			g.mu.Unlock()
			g.metrics.full.Add(1)
			return nil, errQueueFull.with(errQueueFull.Message, wait)
		}
		g.queue.remove(out)
		g.metrics.full.Add(1)
		out.ready <- leave{how: leftShed}
	}
	h.g, h.since, h.ready = g, now, make(chan leave, 1)
	if guard.Claim.Off() {
		h.ready = make(chan leave, 64) // it may be let go more than once
	}
	g.queue.push(h)
	g.metrics.held.Add(1)
	first := g.queue.len() == 1
	if first {
		g.turned = now
		g.arm()
	}
	g.mu.Unlock()
	if first && g.onHeld != nil {
		g.onHeld()
	}
	return nil, nil
}

// next reports whether nobody waits whose turn is before the request's: nobody at all, or only those of lower classes for whom
// the slots that are free are not; the lock is held.
func (g *gate) next(h *hold, now time.Time) bool {
	n := 0
	for i := range g.queue.lines[:h.line()+1] {
		n += g.queue.lines[i].n
	}
	return n == 0 && (g.queue.len() == 0 || g.reserve(g.queue.head().line(), now) > 0)
}

// room reports whether the engine could start the request now; the lock is held.
func (g *gate) room(h *hold, rate float64, step time.Duration, now time.Time) bool {
	waited := time.Duration(0)
	x := g.state(rate)
	x.Step, x.Behind = step.Seconds(), g.queue.len()
	if !h.since.IsZero() { // it is one of them
		waited = now.Sub(h.since)
		x.Behind--
	}
	x.Reserve = g.reserve(h.line(), now)
	return x.Room(h.tokens, waited)
}

// state is what the gate's decision goes by; the lock is held.
func (g *gate) state(rate float64) routing.Gate {
	v := &g.view
	return routing.Gate{AtEngine: g.count, Foreign: v.Foreign, Prompts: len(g.inside), Pending: g.pending, Entered: g.entered, Rate: rate,
		RunLimit: g.runLimit(), KVUsed: v.KVUsed, KVCapacity: v.KVCapacity}
}

// enter counts a request that goes to the engine now; the lock is held.
func (g *gate) enter(h *hold, rate float64, step time.Duration, now time.Time) *pass {
	p := h.room
	if p == nil {
		p = new(pass)
	}
	*p = pass{g: g, tokens: h.tokens, at: now, blind: h.blind, line: h.line(), pending: true, inside: true}
	g.count++
	g.classes.inside[p.line]++
	g.pending += h.tokens
	g.entered += h.tokens
	p.due = now.Add(time.Duration(float64(g.pending)/rate*float64(time.Second)) + step)
	g.inside = append(g.inside, p)
	return p
}

// first says that the request's prefill is over.
func (p *pass) first(now time.Time) {
	if p == nil {
		return
	}
	g := p.g
	g.mu.Lock()
	if p.pending {
		g.unseen++
	}
	g.over(p)
	dry := g.pump(now)
	g.mu.Unlock()
	g.hungry(dry)
}

// predicted says that the prefill should be over by now.
func (p *pass) predicted(now time.Time) {
	if p == nil {
		return
	}
	g := p.g
	g.mu.Lock()
	g.over(p)
	dry := g.pump(now)
	g.mu.Unlock()
	g.hungry(dry)
}

// done says that the engine is done with the request, however it ended.
func (p *pass) done(now time.Time) {
	if p == nil {
		return
	}
	g := p.g
	g.mu.Lock()
	if p.inside {
		p.inside = false
		g.count--
		g.classes.inside[p.line]--
		g.ended++
		if p.pending {
			g.unseen++
		}
		g.over(p)
	}
	dry := g.pump(now)
	g.mu.Unlock()
	g.hungry(dry)
}

// over takes a request's prompt off the pending ones; the lock is held.
func (g *gate) over(p *pass) {
	if !p.pending {
		return
	}
	p.pending = false
	g.pending -= p.tokens
	for i, q := range g.inside {
		if q == p {
			g.inside = append(g.inside[:i], g.inside[i+1:]...)
			return
		}
	}
}

// pump lets through whom the engine can start now, and reports whether it could take one more; the lock is held.
func (g *gate) pump(now time.Time) (dry bool) {
	rate, step := g.account.speed()
	for {
		h := g.queue.head()
		if h == nil {
			return !g.closed && !g.off && g.starts(rate, step, now) > 0 && g.expected(now) == 0
		}
		for h != nil && !g.room(h, rate, step, now) {
			h = g.queue.headAbove(h.line()) // slots may be kept free for those above
		}
		if h == nil {
			g.arm()
			return false
		}
		g.queue.take(h)
		g.turns++
		g.between = blend(g.between, now.Sub(g.turned).Seconds(), max(1/float64(g.turns), 1.0/turnMemory))
		g.turned = now
		g.metrics.waited.observe(now.Sub(h.since))
		h.ready <- leave{how: leftAdmitted, pass: g.enter(h, rate, step, now)}
	}
}

// hungry wakes the thief when the engine runs dry.
func (g *gate) hungry(dry bool) {
	if dry && g.onDry != nil {
		g.onDry()
	}
}

// arm lets the gate look again soon; the lock is held.
func (g *gate) arm() {
	switch {
	case g.closed:
	case g.timer == nil:
		g.timer = time.AfterFunc(gateTurn, g.turn)
	default:
		g.timer.Reset(gateTurn)
	}
}

// turn looks by the clock: patience grows, and predictions pass.
func (g *gate) turn() {
	now := time.Now()
	g.mu.Lock()
	if g.closed || g.queue.len() == 0 {
		g.mu.Unlock()
		return
	}
	for i := 0; i < len(g.inside); {
		if p := g.inside[i]; now.After(p.due) {
			g.over(p)
		} else {
			i++
		}
	}
	dry := g.pump(now)
	g.mu.Unlock()
	g.hungry(dry)
}

// see takes a reading of the engine's pages. Requests whose first token we cannot see leave the pending count by the
// engine's own counter of first tokens; without one, when the engine says that nothing waits there.
func (g *gate) see(v EngineView, now time.Time) {
	g.mu.Lock()
	before := g.view
	g.learn(&v)
	g.view = v
	g.entered = 0
	free := 0
	switch {
	case v.FirstTokens.OK && before.FirstTokens.OK:
		if d := v.FirstTokens.V - before.FirstTokens.V; d >= 0 {
			free = int(max(0, d-g.unseen))
			g.unseen = max(0, g.unseen-d)
		} else {
			g.unseen = 0 // the engine has restarted
		}
	default:
		g.unseen = 0 // at the first reading the counter says nothing of those that are there
		if v.Waiting.OK && v.Waiting.V == 0 {
			free = len(g.inside)
		}
	}
	for i := 0; i < len(g.inside) && free > 0; {
		p := g.inside[i]
		if !p.blind || p.at.After(v.At.Add(-2*time.Millisecond)) {
			i++
			continue
		}
		free--
		g.over(p)
	}
	dry := g.pump(now)
	g.mu.Unlock()
	g.hungry(dry)
}

// drop takes a held request out of the queue because its client hung up or waited too long. If it had just left, its
// pass is given back.
func (g *gate) drop(h *hold, now time.Time) {
	g.mu.Lock()
	was := g.queue.remove(h)
	g.mu.Unlock()
	if was {
		return
	}
	if l := <-h.ready; l.pass != nil {
		l.pass.done(now)
	}
}

// drain hands all held requests over.
func (g *gate) drain() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for h := g.queue.head(); h != nil; h = g.queue.head() {
		g.queue.remove(h)
		g.metrics.drained.Add(1)
		h.ready <- leave{how: leftDrained}
	}
}

// close stops the gate's timer; what is held goes through.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.timer != nil {
		g.timer.Stop()
	}
	for h := g.queue.head(); h != nil; h = g.queue.head() {
		g.queue.remove(h)
		h.ready <- leave{how: leftAdmitted, pass: g.enter(h, defaultPrefillRate, 0, time.Now())}
	}
}

// load returns how many are held and their prompt tokens.
func (g *gate) load() (held, tokens int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.queue.len(), g.queue.tokens()
}

// ticket is a pull of ours that a victim granted: the request that comes with it passes the gate once.
type ticket struct {
	until  time.Time
	tokens int // expected with it; 0 = not granted yet
}

// takeTicket uses a ticket up; the lock is held.
func (g *gate) takeTicket(id uint64, now time.Time) bool {
	t, ok := g.tickets[id]
	if guard.Ticket.Off() {
		return id != 0
	}
	delete(g.tickets, id)
	if !ok || !now.Before(t.until) {
		return false
	}
	if g.came != nil {
		g.came.Add(1)
	}
	return true
}

// expected returns the prompt tokens that are on their way with tickets; the lock is held.
func (g *gate) expected(now time.Time) (tokens int) {
	for id, t := range g.tickets {
		if now.After(t.until) && !guard.Ticket.Off() {
			delete(g.tickets, id)
			continue
		}
		tokens += t.tokens
	}
	return tokens
}

// GateCounts counts what the gate did.
type GateCounts struct {
	Passed, Held                       uint64 // let through at once, held first
	Full, TimedOut, Drained, Stolen    uint64 // how held ones ended but by going to the engine
	Shed                               uint64 // refused since they would have waited too long
	HeldNow, HeldTokens, PendingTokens int
	Waited                             Histogram
}

func (g *gate) counts() GateCounts {
	m := &g.metrics
	g.mu.Lock()
	pending := g.pending
	g.mu.Unlock()
	held, tokens := g.load()
	return GateCounts{Passed: m.passed.Load(), Held: m.held.Load(), Full: m.full.Load(), TimedOut: m.timedOut.Load(), Shed: m.shed.Load(),
		Drained: m.drained.Load(), Stolen: m.stolen.Load(), HeldNow: held, HeldTokens: tokens, PendingTokens: pending,
		Waited: m.waited.snapshot()}
}
