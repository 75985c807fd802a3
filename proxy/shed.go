package proxy

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

const (
	// surePrefills is how many prefills an engine must have been measured by before anybody is refused on a prediction.
	surePrefills = 20
	// sureTurns is how many requests must have left the queue before the time between them says anything.
	sureTurns  = 8
	turnMemory = 16 // turns
	// sureWait is how long somebody must have waited before others are refused on a prediction: what a burst does to a learned
	// speed must not refuse what the engine would begin at once.
	sureWait = time.Second
	// readmit is how empty a queue that was too full for a class must be, or how short its wait, until the class is let in
	// again: a record each time that one request leaves a full queue would tell the fleet nothing.
	readmit = 0.75
)

// patience is how long a request of a class may wait, and is let wait: with the default of 30 s, 10 s for the first class and
// 300 s for those below the default one.
func (g *gate) patience(line int) time.Duration {
	switch uint8(line + 1) {
	case routing.ClassPriority:
		return g.timeout / 3
	case routing.ClassDefault:
		return g.timeout
	}
	return 10 * g.timeout
}

// budget is how long h may wait from now on.
func (g *gate) budget(h *hold, now time.Time) time.Duration {
	d := g.patience(h.line())
	if t := h.req.Deadline; !t.IsZero() {
		d = min(d, t.Sub(now))
	}
	return d
}

// refusal says whether the queue is full for h, by the given share of its limit, and how long h would wait: what is before it
// by the engine's speed, or, where slots are what lacks, by the pace at which requests have left the queue; 0 as long as
// nothing sure can be said. The lock is held.
func (g *gate) refusal(h *hold, rate, share float64, now time.Time) (full bool, wait time.Duration) {
	q := &g.queue
	full = float64(q.places()) >= share*float64(g.limit) || q.crowded(h, g.limit)
	if !g.account.sure() || q.len() == 0 || now.Sub(q.list[0].since) < sureWait {
		return full, 0
	}
	n, tokens := q.ahead(h)
	s := float64(g.pending+tokens) / rate
	if g.turns >= sureTurns {
		s = max(s, float64(n+1)*g.between-now.Sub(g.turned).Seconds())
	}
	return full, time.Duration(s * float64(time.Second))
}

// drainTime predicts when what is held will be at the engine; at least a second.
func (g *gate) drainTime() time.Duration {
	rate, _ := g.account.speed()
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.drainsIn(rate)
}

// drainsIn is drainTime with the lock held.
func (g *gate) drainsIn(rate float64) time.Duration {
	s := float64(g.pending+g.queue.tokens()) / rate
	if g.turns >= sureTurns {
		s = max(s, float64(g.queue.len())*g.between)
	}
	return max(time.Second, time.Duration(s*float64(time.Second)))
}

// lowest returns the lowest class of which a usual request would be taken now; 0 = of none.
func (g *gate) lowest(now time.Time) uint8 {
	rate, _ := g.account.speed()
	g.mu.Lock()
	defer g.mu.Unlock()
	refused := uint8(0)
	for c := routing.ClassBatch; c >= routing.ClassPriority; c-- {
		share := 1.0
		if refused < g.refuses {
			share = readmit
		}
		if g.would(&routing.Request{Class: c}, rate, share, now) {
			break
		}
		refused++
	}
	g.refuses = refused
	return routing.ClassBatch - refused
}

// takes reports whether a request like r would be taken now, for those who ask.
func (g *gate) takes(r *routing.Request, now time.Time) bool {
	rate, _ := g.account.speed()
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.would(r, rate, 1, now)
}

// would reports whether r would be taken, of a tenant that is not known; the lock is held.
func (g *gate) would(r *routing.Request, rate, share float64, now time.Time) bool {
	if g.queue.len() == 0 {
		return true // there is room, or nobody knows better than the engine
	}
	h := &hold{req: r}
	full, wait := g.refusal(h, rate, share, now)
	return (!full || g.queue.yields(h) != nil) && wait.Seconds() <= share*g.budget(h, now).Seconds()
}

// LowestClass returns the lowest class of which this agent takes requests for its engine now, routing.ClassBatch if all; 0 =
// none.
func (p *Proxy) LowestClass(now time.Time) uint8 { return p.gate.lowest(now) }

// runLimit is how many requests the engine may be given at once, as it says or as learned; the lock is held.
func (g *gate) runLimit() routing.Opt[int] {
	if !g.view.RunLimit.OK && g.learned > 0 {
		return routing.Some(g.learned)
	}
	return g.view.RunLimit
}

// engineQueue is how much work, in time, an engine that does not say how many it runs at once may have in its own queue.
const engineQueue = 300 * time.Millisecond

// learn finds out how many requests an engine can use that does not tell how many it runs at once, such as vLLM, whose queue
// has no end. If some waited there at two readings in a row and no more ran than before, and for longer than the prompts that
// are there take, it is those that run and as many as it ends within engineQueue; when none waits and as many run, it may be
// more. Every engine has requests that wait for their prefill's turn, or for the end of a step. The lock is held.
func (g *gate) learn(v *EngineView) {
	if v.RunLimit.OK || !v.Running.OK || !v.Waiting.OK {
		g.learned, g.waited = 0, false
		return
	}
	if d := v.At.Sub(g.view.At).Seconds(); d > 0 && !g.view.At.IsZero() {
		g.pace = blend(g.pace, float64(g.ended)/d, 0.3)
		g.ended = 0
	}
	rate, step := g.account.speed()
	turn := float64(g.pending)/rate + step.Seconds()
	n, before := v.Running.V, g.view.Running
	use := n + max(1, int(g.pace*engineQueue.Seconds()))
	switch {
	case v.Waiting.V == 0:
		if g.learned > 0 && n >= g.learned*3/4 {
			g.learned += max(4, g.learned/4)
		}
	case g.waited && before.OK && n <= before.V && n > 0 && float64(v.Waiting.V) > 2*turn*g.pace:
		g.learned = use
	case g.learned > 0:
		g.learned = max(g.learned, use)
	}
	g.waited = v.Waiting.V > 0
}

// allFull is the answer to a request that no replica takes, whatever its body says; nil = one may.
func (x *exchange) allFull() *apiError {
	p := x.p
	if x.role != roleEntry || p.draining.Load() || p.shadow.on.Load() || x.class.Service&gatedServices == 0 {
		return nil
	}
	if _, all := p.cfg.Table.Snapshot().Refusing(x.highestClass(), x.arrived); !all {
		return nil
	}
	return x.full(x.highestClass())
}

// full is the answer where all replicas refuse the class. Its wait is what our own queue needs, or, if that is empty, what the
// least loaded replica does.
func (x *exchange) full(class uint8) *apiError {
	p := x.p
	wait := p.gate.drainTime()
	if held, _ := p.gate.load(); held == 0 {
		drain, _ := p.cfg.Table.Snapshot().Refusing(class, time.Now())
		wait = max(drain, errAllFull.RetryAfter)
	}
	return errAllFull.with(errAllFull.Message, wait)
}

// gatedServices are those whose prefill can be told from their path.
const gatedServices = routing.ServeChat | routing.ServeCompletions | routing.ServeResponses | routing.ServeMessages
