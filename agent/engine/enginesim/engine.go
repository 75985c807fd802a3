package enginesim

import "time"

// Engine is the pure model of one replica. It knows no clock: time is given with every call, counts from the engine's
// start, and must not run backwards (an earlier time counts as the latest one seen). Not safe for concurrent use.
type Engine struct {
	p    Params
	cost costs
	now  picos // the state is exact at this time
	dead bool

	paused   bool
	pausedAt picos

	waiting   queue
	prefill   []*sequence // admitted, prompt not computed
	decode    byEnd
	order     []*sequence // running, by admission
	streams   int         // decoding sequences that want an event for each token
	context   int         // KV tokens that the decoding sequences read in a step
	used      int         // KV tokens in use; the idle blocks of the prefix cache come on top
	pending   int
	preempted int
	cache     cache
	pool      []*sequence

	// The work under way: one step with prefill chunks, or a run of equal decode steps.
	step    int64 // steps completed
	busy    bool
	idleAt  picos // when an idle engine got work: its next step starts then
	wakeup  picos // from the arrival at an idle engine to its first step
	start   picos
	left    int   // steps under way
	length  picos // duration of the first of them
	grow    picos // each one takes so much longer than the one before
	chunks  []chunk
	decoded int // sequences that decode in it

	events []Event
	taken  bool // events were handed out and may be overwritten
	count  Counters
}

// chunk is a part of a prompt computed in one step.
type chunk struct {
	seq    *sequence
	gen    uint32
	tokens int
}

// Counters only grow. Tokens and requests; Busy is the time spent in steps.
type Counters struct {
	Submitted, Rejected, Done, Aborted, Lost uint64
	Queried, Cached                          uint64 // prompt tokens looked up in the prefix cache, and found
	Prefilled, Generated                     uint64 // tokens computed
	FirstTokens, Preemptions, Steps          uint64
	Busy                                     time.Duration
}

// Load is the state at one moment.
type Load struct {
	Running, Waiting int
	Preempted        int // of the waiting ones, those that have run before
	Pending          int // prompt tokens of waiting and running jobs that are neither computed nor cached
	KVUsed           int // tokens in use
	KVIdle           int // tokens that only the prefix cache holds
}

// New makes an idle engine at time zero. It panics on parameters that [Params.Validate] refuses.
func New(p Params) *Engine {
	if err := p.Validate(); err != nil {
		panic(err)
	}
	p = p.withDefaults()
	return &Engine{p: p, cost: p.Cost.at(p.Speed), cache: newCache()}
}

// Params are those of New with the defaults filled in, at the present speed.
func (e *Engine) Params() Params { return e.p }

// Counters are the totals up to the latest time seen.
func (e *Engine) Counters() Counters { return e.count }

// Load is the state at the latest time seen.
func (e *Engine) Load() Load {
	return Load{Running: len(e.order), Waiting: e.waiting.len(), Preempted: e.preempted, Pending: e.pending, KVUsed: e.used, KVIdle: e.cache.idle}
}

// Match is the number of prompt tokens that the prefix cache would supply for these blocks now.
func (e *Engine) Match(blocks []uint64) (tokens int) {
	for _, h := range blocks[:e.cache.match(blocks)] {
		tokens += int(e.cache.nodes[e.cache.index[h]].tokens)
	}
	return tokens
}

// Submit queues a job. Errors are ErrBusy, ErrTooLong, ErrNoPrompt and ErrDead; then nothing has changed.
func (e *Engine) Submit(now time.Duration, j Job) (Handle, error) {
	e.advance(now, false)
	switch {
	case e.dead:
		return Handle{}, ErrDead
	case j.Prompt < 1:
		return Handle{}, ErrNoPrompt
	case j.Prompt+j.Output > e.p.Context:
		return Handle{}, ErrTooLong
	case e.p.MaxQueued > 0 && len(e.order)+e.waiting.len() >= e.p.MaxQueued:
		e.count.Rejected++
		return Handle{}, ErrBusy
	}
	s := e.take()
	s.job, s.state, s.prompt = j, seqWaiting, j.Prompt
	if e.p.NoCache {
		s.job.Blocks = nil
	}
	s.pending = max(1, j.Prompt-e.Match(s.job.Blocks))
	e.pending += s.pending
	e.waiting.push(s)
	e.count.Submitted++
	if e.busy {
		e.stopRun()
	} else if len(e.order) == 0 && e.waiting.len() == 1 {
		e.idleAt = e.clock() + e.wakeup
	}
	return Handle{s, s.gen}, nil
}

// Abort takes a job out, wherever it is, and frees what it holds; the step under way still takes its planned time.
// It reports false if the job has ended. An aborted job has no further events.
func (e *Engine) Abort(now time.Duration, h Handle) bool {
	e.advance(now, false)
	s := h.seq
	if s == nil || s.gen != h.gen || s.state == seqFree {
		return false
	}
	e.stopRun() // whatever it held or blocked is free at the next step
	if s.state == seqWaiting {
		e.waiting.remove(s)
	} else {
		e.leave(s)
	}
	e.count.Aborted++
	e.put(s)
	return true
}

// Tokens is the number of tokens that a job has at the latest time seen; 0 if it has left the engine.
func (e *Engine) Tokens(h Handle) int {
	if h.seq == nil || h.seq.gen != h.gen {
		return 0
	}
	return e.generated(h.seq)
}

// Pause freezes the engine: time passes, nothing happens, until Resume. Jobs may be submitted and aborted meanwhile.
func (e *Engine) Pause(now time.Duration) {
	e.advance(now, false)
	if !e.paused {
		e.paused, e.pausedAt = true, e.now
	}
}

// Resume ends a pause; the step under way goes on where it was.
func (e *Engine) Resume(now time.Duration) {
	e.advance(now, false)
	if e.paused {
		e.paused = false
		e.start += e.now - e.pausedAt
		e.idleAt = max(e.idleAt, e.now)
	}
}

// SetSpeed changes the speed from the next step on: 0.2 is five times slower than nominal. It must be positive.
func (e *Engine) SetSpeed(now time.Duration, speed float64) {
	e.advance(now, false)
	e.stopRun()
	e.p.Speed, e.cost = speed, e.p.Cost.at(speed)
}

// Kill ends the engine: every job is Lost, in order of admission and then of arrival, and nothing more is accepted.
func (e *Engine) Kill(now time.Duration) {
	e.advance(now, false)
	if e.dead {
		return
	}
	for len(e.order) > 0 {
		e.lose(e.order[0])
	}
	for e.waiting.len() > 0 {
		e.lose(e.waiting.front())
	}
	e.cache = newCache()
	e.dead, e.busy = true, false
}

func (e *Engine) lose(s *sequence) {
	e.emit(Event{Kind: Lost, Job: s.job.ID, At: e.now.ceil(), Tokens: e.generated(s)})
	if s.state == seqWaiting {
		e.waiting.pop()
	} else {
		e.leave(s)
	}
	e.count.Lost++
	e.put(s)
}

// Remember puts blocks of finished text into the prefix cache, as engines do with answers, for the next turn of a
// conversation: the chained hashes of full blocks from the beginning of the prompt on.
func (e *Engine) Remember(now time.Duration, blocks []uint64) {
	e.advance(now, false)
	if e.p.NoCache || e.dead {
		return
	}
	for i := len(blocks) - 1; i >= 0; i-- { // the first block last: it is of use to more
		if n, ok := e.cache.index[blocks[i]]; !ok {
			n = e.cache.add(blocks[i], e.p.BlockTokens)
			e.cache.unref(n)
		} else if e.cache.nodes[n].refs == 0 {
			e.cache.unlink(n)
			e.cache.pushFront(n)
		}
	}
	e.cache.shrink(e.p.KVTokens - e.used)
}

// NextEvent is the earliest time at which Advance may have something to tell; false if nothing will happen by itself.
func (e *Engine) NextEvent() (time.Duration, bool) {
	switch {
	case len(e.events) > 0 && !e.taken:
		return e.now.ceil(), true
	case e.paused || e.dead:
		return 0, false
	case e.busy:
		return (e.start + e.elapsed(e.left)).ceil(), true
	case e.waiting.len()+len(e.order) > 0:
		return e.idleAt.ceil(), true
	}
	return 0, false
}

// Advance moves the engine to now and returns what happened, in order, since the last call, including what calls other
// than Advance came across. The slice is valid until the next call of any method.
func (e *Engine) Advance(now time.Duration) []Event {
	e.advance(now, true)
	e.taken = true
	return e.events
}

func (e *Engine) emit(ev Event) { e.events = append(e.events, ev) }

// clock is the time at which the engine's own time stands.
func (e *Engine) clock() picos {
	if e.paused {
		return e.pausedAt
	}
	return e.now
}

// generated is the number of tokens that s has.
func (e *Engine) generated(s *sequence) int {
	if s.state == seqDecode {
		return s.got + int(e.step-s.since)
	}
	return s.got
}

func (e *Engine) take() *sequence {
	if n := len(e.pool); n > 0 {
		s := e.pool[n-1]
		e.pool = e.pool[:n-1]
		return s
	}
	return &sequence{}
}

func (e *Engine) put(s *sequence) {
	e.pending -= s.pending
	if s.preempted {
		e.preempted--
	}
	*s = sequence{gen: s.gen + 1, nodes: s.nodes[:0]}
	e.pool = append(e.pool, s)
}
