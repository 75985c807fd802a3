package proxy

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Load is what the agent knows exactly about its own engine's work, because it passed it on itself, over all entries.
type Load struct {
	Running       int    // requests at the engine whose first content has come
	Waiting       int    // requests at the engine without content yet, in its batch or its queue
	PendingTokens int    // prompt tokens of those without content
	Held          int    // requests held at this agent in front of the engine
	HeldTokens    int    // their prompt tokens
	Accepted      uint32 // requests ever given to the engine; wraps
	Prefills      int    // first contents measured since the start
	Tokens        uint64 // events with content streamed since the start

	PrefillRate routing.Opt[float64]       // prompt tokens/s, learned
	PrefillAt   time.Time                  // when that was last measured
	DecodeStep  routing.Opt[time.Duration] // time between two tokens of one stream, learned
	TTFT        routing.Opt[time.Duration] // learned mean time from sent to first content
}

// Learning; the prefill rate is routing.PrefillRate's.
const (
	stepMemory  = 256 // decode steps after which a sample has replaced 63 % of the old value
	eventMemory = 32  // answers, likewise
	ttftMemory  = 16  // requests, likewise
	stepSample  = 32  // events of one stream after which it is asked while it still runs
)

// account counts what is at our own engine and learns its speed. It is safe for concurrent use.
type account struct {
	mu       sync.Mutex
	running  int
	waiting  int
	pending  int // tokens
	accepted uint32
	prefills int
	events   uint64
	flights  *flight // all under way

	busySince time.Time // there were prompts to do since, as far as that was not told to prefill
	prefill   routing.PrefillRate
	rated     time.Time     // when that was last measured
	units     atomic.Uint32 // how often prompts began to be counted in other tokens
	old       int           // prompts at the engine that were counted before
	bound     float64       // tokens/s; the engine was seen to be at least so fast, by answers that came whole
	blind     int           // answers that came whole

	blindSince  time.Time // start of the window for the bound by many answers
	blindTokens int       // prompt tokens of the answers that began and came whole in it
	step        float64   // seconds an event; 0 = not known
	perEvent    float64   // tokens that an event brings, where answers tell their tokens; 0 = not known
	ttft        float64   // seconds; 0 = not known
}

// flight is one request at our own engine. Its methods are called at most once each but for steps, by the owner.
type flight struct {
	a      *account
	tokens int
	at     time.Time
	prompt bool // still counted as pending
	over   bool
	guess  bool // its prefill was declared over by prediction, so nothing may be learned from it
	units  uint32

	pass *pass // through the gate; nil = it did not come through it

	firstAt time.Time
	lastAt  time.Time
	steps   int // content events since the last sample

	life       *life  // of its attempt
	watch      *watch // of the same
	prev, next *flight
}

// start counts a request that goes to the engine now, and predicts how long the engine needs until it has worked off its prompt
// and those before it. l and w are its attempt's, which can be ended from outside; they may be nil.
func (a *account) start(f *flight, tokens int, l *life, w *watch, now time.Time) (prefill time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pending == 0 && a.waiting == 0 {
		a.busySince = now
	}
	a.waiting++
	a.pending += tokens
	a.accepted++
	*f = flight{a: a, tokens: tokens, at: now, prompt: true, units: a.units.Load(), life: l, watch: w, next: a.flights}
	if f.next != nil {
		f.next.prev = f
	}
	a.flights = f
	return a.prefillTime()
}

// cutAll ends the attempts at our own engine that were silent for so long, 0 = all; their exchanges go on elsewhere or end.
func (a *account) cutAll(cause error, silent time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock() // so that no life is used again for another request meanwhile
	for f := a.flights; f != nil; f = f.next {
		if f.life != nil && (silent == 0 || f.watch.silence() >= silent) {
			f.life.end(cause)
		}
	}
}

// closeBusy adds the time since the last event to the busy period, but not time with prompts that were counted in other tokens.
func (a *account) closeBusy(now time.Time) {
	if a.waiting > 0 && a.old == 0 {
		a.prefill.Busy(now.Sub(a.busySince))
	}
	a.busySince = now
}

// first says that the request's first content is here.
func (f *flight) first(now time.Time) {
	f.learn(now)
	f.pass.first(now)
}

// learn counts the first content and takes from it what it says about the engine's speed.
func (f *flight) learn(now time.Time) {
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	f.firstAt, f.lastAt = now, now
	if !f.leavePrompt(now) {
		return
	}
	a.prefills++
	a.ttft = blend(a.ttft, now.Sub(f.at).Seconds(), 1.0/ttftMemory)
	if f.units == a.units.Load() && a.old == 0 && a.prefill.Finish(f.tokens) {
		a.rated = now
	}
}

// predicted says that the prefill should be over by now, for answers that do not show it (not streamed).
func (f *flight) predicted(now time.Time) {
	f.a.mu.Lock()
	if f.leavePrompt(now) {
		f.guess = true
	}
	f.a.mu.Unlock()
	f.pass.predicted(now)
}

// leavePrompt moves the request from waiting to running; false if it had left or is over.
func (f *flight) leavePrompt(now time.Time) bool {
	if !f.prompt || f.over {
		return false
	}
	a := f.a
	f.leaves(now)
	f.prompt = false
	a.running++
	return true
}

// leaves takes the request out of those without a first token; the lock is held.
func (f *flight) leaves(now time.Time) {
	a := f.a
	a.closeBusy(now)
	a.waiting--
	a.pending -= f.tokens
	if f.units != a.units.Load() {
		a.old--
	}
}

// content counts n further pieces of content.
func (f *flight) content(n int, now time.Time) {
	f.steps += n
	f.lastAt = now
	if f.steps >= stepSample {
		f.sample()
	}
}

// sample learns the decode step from the stream since the last sample.
func (f *flight) sample() {
	if f.steps < 2 || !f.lastAt.After(f.firstAt) {
		return
	}
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	a.step = blend(a.step, f.lastAt.Sub(f.firstAt).Seconds()/float64(f.steps), float64(f.steps)/(float64(f.steps)+stepMemory))
	a.events += uint64(f.steps)
	f.firstAt, f.steps = f.lastAt, 0
}

// forgetRate begins to learn the prefill rate anew: it was counted in wrong tokens. So are the prompts that are at the engine; they
// teach nothing. (A replica whose queue was long just then taught itself a 64th of its rate by them, and was idle for 40 s.)
func (a *account) forgetRate() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.prefill, a.rated = routing.PrefillRate{}, time.Time{}
	a.units.Add(1)
	a.old = a.waiting
}

// told says how many tokens a streamed answer had, by its usage, and in how many events they came: engines put several into
// one, some always, some when they are busy.
func (f *flight) told(tokens, events int) {
	if events < 2 || tokens < 1 {
		return
	}
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	a.perEvent = blend(a.perEvent, max(1, float64(tokens)/float64(events)), 1.0/eventMemory)
}

// done ends the request, once, however it ended; whole means that its answer came whole.
func (f *flight) done(now time.Time, whole bool) {
	defer f.pass.done(now)
	f.sample()
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.over {
		return
	}
	if (f.prompt || f.guess) && whole && now.After(f.at) {
		a.bound = max(a.bound, float64(f.tokens)/now.Sub(f.at).Seconds())
		a.blind++
		a.seenBlind(f, now)
	}
	if f.prompt {
		f.leaves(now)
	} else {
		a.running--
	}
	if f.prev != nil {
		f.prev.next = f.next
	} else {
		a.flights = f.next
	}
	if f.next != nil {
		f.next.prev = f.prev
	}
	f.prev, f.next, f.life, f.watch = nil, nil, nil, nil
	f.over = true
}

// seenBlind takes the bound that many answers give together: what began and came whole within a window was computed in
// it. One answer alone says little of an engine that batches.
func (a *account) seenBlind(f *flight, now time.Time) {
	window := now.Sub(a.blindSince)
	if window > 8*blindWindow { // a pause, or the first
		a.blindSince, a.blindTokens = now, 0
		return
	}
	if !f.at.Before(a.blindSince) {
		a.blindTokens += f.tokens
	}
	if window >= blindWindow {
		a.bound = max(a.bound, float64(a.blindTokens)/window.Seconds())
		a.blindSince, a.blindTokens = now, 0
	}
}

// blend moves old a share of the way to sample; the first sample counts whole.
func blend(old, sample, share float64) float64 {
	if old == 0 {
		return sample
	}
	return old + (sample-old)*share
}

// load returns the current numbers.
func (a *account) load() Load {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := Load{Running: a.running, Waiting: a.waiting, PendingTokens: a.pending, Accepted: a.accepted, Prefills: a.prefills,
		Tokens: a.events}
	l.PrefillRate, l.PrefillAt = a.prefill.Rate(), a.rated
	if step := a.decodeStep(); step > 0 {
		l.DecodeStep = routing.Some(step)
	}
	if a.ttft > 0 {
		l.TTFT = routing.Some(time.Duration(a.ttft * float64(time.Second)))
	}
	return l
}

// speed returns the prefill rate, in prompt tokens/s, and the decode step, as far as they are known.
func (a *account) speed() (rate float64, step time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.believed(), a.decodeStep()
}

// decodeStep is the time between two tokens of a stream, 0 = not known; the lock is held.
func (a *account) decodeStep() time.Duration {
	return time.Duration(a.step / max(1, a.perEvent) * float64(time.Second))
}

// sure reports whether predictions rest on enough measurements.
func (a *account) sure() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.prefills+a.blind >= surePrefills
}

// blindPrefillRate is believed of an engine whose first tokens nobody ever saw: a gate that holds its traffic back on a
// guess should err to the side of letting it through.
const (
	blindPrefillRate = 8000 // prompt tokens/s
	blindAnswers     = 20
	blindWindow      = 100 * time.Millisecond
)

// believed is the prefill rate that predictions go by, in prompt tokens/s; the lock is held.
func (a *account) believed() float64 {
	switch rate := a.prefill.Rate(); {
	case rate.OK:
		return rate.V
	case a.blind >= blindAnswers:
		return max(blindPrefillRate, a.bound)
	}
	return max(defaultPrefillRate, a.bound)
}

// defaultPrefillRate is believed of an engine that has not been measured (design section 7).
const defaultPrefillRate = 2000 // prompt tokens/s

// prefillTime predicts how long the engine needs until it has worked off what it has; the lock is held.
func (a *account) prefillTime() time.Duration {
	return time.Duration(float64(a.pending) / a.believed() * float64(time.Second))
}

// suspicion counts our own engine's hard failures over all entries.
type suspicion struct {
	mu sync.Mutex
	s  routing.Suspicion
}

func (s *suspicion) note(o routing.Outcome, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.s.Note(o, now)
}

// Suspect reports whether our own engine has failed so often in a row, whoever asked, that our record should say so.
func (p *Proxy) Suspect(now time.Time) bool {
	p.suspicion.mu.Lock()
	defer p.suspicion.mu.Unlock()
	return p.suspicion.s.Suspect(now)
}
