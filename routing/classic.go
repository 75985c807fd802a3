package routing

import (
	"math/rand/v2"
	"sync"
	"time"
)

// pool is the entries of a group that a classic policy may choose from: those of the best level, in the group's order.
// It needs no memory: each walk (all) skips the others.
type pool struct {
	s      *Snapshot
	g      *group
	r      *Request
	now    tick
	class  uint8
	worst  level
	n      int
	reason Reason // ReasonPanic or ReasonOnly; ReasonNone otherwise
}

// newPool counts the group's members by level; n = 0 means that none can be picked.
func newPool(s *Snapshot, r *Request, now time.Time) pool {
	x := pool{s: s, g: s.groupFor(r), r: r, now: s.table.clock.tick(now), class: r.class()}
	if x.g == nil {
		return x
	}
	count := x.g.count(r, x.now, x.class)
	x.worst = count.worst(r)
	if x.worst == levelNever {
		return x
	}
	for l := range x.worst + 1 {
		x.n += count[l]
	}
	if x.n == 1 {
		x.reason = ReasonOnly
	}
	if x.worst >= levelSoft {
		x.reason = ReasonPanic
	}
	return x
}

// allows reports whether an entry belongs to the pool.
func (x *pool) allows(e *entry) bool {
	return e.fits(x.r) && e.level(e.peer.view.Load(), x.r, x.now, x.class) <= x.worst
}

// all yields the pool's replicas in the group's order.
func (x *pool) all(yield func(*Peer) bool) {
	for i := range x.g.entries {
		if e := &x.g.entries[i]; x.allows(e) && !yield(e.peer) {
			return
		}
	}
}

// decision returns the choice of p.
func (x *pool) decision(p *Peer, why Reason) Decision {
	if x.reason != ReasonNone {
		why = x.reason
	}
	c := candidate{peer: p, view: p.view.Load()}
	c.rate(x.s, float64(x.r.PromptTokens), x.now)
	return Decision{Peer: p, Score: c.score, First: c.first, Tokens: c.tokens, Reason: why}
}

// least returns the member with the lowest cost and the runner-up; ties go to a random one, without a source to the
// first.
func (x *pool) least(rnd *rand.Rand, cost func(l load) float64) Decision {
	var best, second *Peer
	var low, next float64
	ties := uint64(1)
	for p := range x.all {
		switch c := cost(p.load(p.view.Load(), x.s)); {
		case best == nil || c < low:
			second, next = best, low
			best, low, ties = p, c, 1
		case c == low:
			ties++
			second, next = p, c
			if rnd != nil && intn(rnd, ties) == 0 {
				best, second = p, best
			}
		case second == nil || c < next:
			second, next = p, c
		}
	}
	d := x.decision(best, ReasonBest)
	d.RunnerUp = second
	return d
}

// random is uniform over the usable replicas.
type random struct{}

func (*random) Name() string { return "random" }

func (*random) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	k := intn(rnd, uint64(x.n))
	for p := range x.all {
		if k == 0 {
			return x.decision(p, ReasonRandom)
		}
		k--
	}
	return s.none(x.g, r, now) // the last one was put aside meanwhile
}

// leastRequests takes the replica with the fewest requests: running, waiting, held, and sent since its record.
type leastRequests struct{}

func (*leastRequests) Name() string { return "least_requests" }

func (*leastRequests) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	return x.least(rnd, func(l load) float64 { return l.running + l.waiting })
}

// leastTokens takes the replica with the fewest outstanding tokens: prompt tokens without a first token, and an
// assumed number to come for each request there.
type leastTokens struct{ output float64 }

func (*leastTokens) Name() string { return "least_tokens" }

func (a *leastTokens) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	return x.least(rnd, func(l load) float64 { return l.queue + a.output*(l.running+l.waiting) })
}

// ewma is the peak-sensitive average of the time to first token times the requests under way, by the power of two
// choices (Finagle's peak EWMA). A replica never used costs nothing until its first request is out.
type ewma struct{}

func (*ewma) Name() string { return "ewma" }

func (*ewma) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	a := intn(rnd, uint64(x.n))
	b := a
	if x.n > 1 {
		b = (a + 1 + intn(rnd, uint64(x.n-1))) % x.n
	}
	var two [2]*Peer
	k := 0
	for p := range x.all {
		if k == a {
			two[0] = p
		}
		if k == b {
			two[1] = p
		}
		k++
	}
	if two[0] == nil || two[1] == nil {
		return s.none(x.g, r, now)
	}
	cost := func(p *Peer) float64 {
		c := p.Latency().Or(0).Seconds() * float64(p.inflight.Load()+1)
		if c == 0 {
			c = 10 * float64(p.inflight.Load()) // unmeasured: one request finds out, more wait for it
		}
		return c + p.penalty(x.now)
	}
	if cost(two[1]) < cost(two[0]) {
		two[0], two[1] = two[1], two[0]
	}
	d := x.decision(two[0], ReasonBest)
	if two[0] != two[1] {
		d.RunnerUp = two[1]
	}
	return d
}

// rotation is the state of a rotating policy for one model.
type rotation struct {
	last    uint64 // boot id that had its turn
	weights map[uint64]float64
}

// rotations keeps one rotation per model name; names are bounded by what the fleet lists.
type rotations struct {
	mu sync.Mutex
	m  map[string]*rotation
}

func (x *rotations) of(model string) *rotation {
	r := x.m[model]
	if r == nil {
		if x.m == nil {
			x.m = map[string]*rotation{}
		}
		r = &rotation{weights: map[uint64]float64{}}
		x.m[model] = r
	}
	return r
}

// roundRobin goes through the usable replicas by boot id.
type roundRobin struct{ rotations }

func (*roundRobin) Name() string { return "round_robin" }

func (a *roundRobin) Pick(s *Snapshot, r *Request, now time.Time, _ *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	turn := a.of(r.Model)
	var first, next *Peer
	for p := range x.all {
		if first == nil {
			first = p
		}
		if p.boot > turn.last {
			next = p
			break
		}
	}
	if next == nil {
		next = first
	}
	if next == nil {
		return s.none(x.g, r, now)
	}
	turn.last = next.boot
	return x.decision(next, ReasonTurn)
}

// weightedRoundRobin is nginx's smooth weighted round robin: each turn every replica gains its weight, the highest is
// taken and pays the sum. Weights 5, 1, 1 give a a b a c a a.
type weightedRoundRobin struct{ rotations }

func (*weightedRoundRobin) Name() string { return "weighted_round_robin" }

func (a *weightedRoundRobin) Pick(s *Snapshot, r *Request, now time.Time, _ *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	turn := a.of(r.Model)
	var best *Peer
	sum, high := 0.0, 0.0
	for p := range x.all {
		w := 1.0
		if v := p.view.Load(); v != nil {
			w = v.report.Weight.Or(1) * p.ramp(v, s, x.now)
		}
		sum += w
		c := turn.weights[p.boot] + w
		turn.weights[p.boot] = c
		if best == nil || c > high {
			best, high = p, c
		}
	}
	if best == nil {
		return s.none(x.g, r, now)
	}
	turn.weights[best.boot] -= sum
	if len(turn.weights) > 2*len(x.g.entries)+16 { // boots that are gone
		for boot := range turn.weights {
			if s.byBoot[boot] == nil {
				delete(turn.weights, boot)
			}
		}
	}
	return x.decision(best, ReasonTurn)
}
