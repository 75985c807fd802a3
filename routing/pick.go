package routing

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// PolicyOption changes a policy's default; each says which policies read it.
type PolicyOption func(*options)

type options struct {
	ask     int
	whole   bool // a fleet of up to MaxAsk is asked whole
	vnodes  int
	bound   float64
	output  float64
	digests bool
}

// WithAsk sets how many replicas "auto" asks, whatever the fleet (0 = none). By default it asks all of up to 16 members,
// and three of more.
func WithAsk(n int) PolicyOption { return func(o *options) { o.ask, o.whole = n, false } }

// WithDigests says whether "auto" uses the peers' prefix digests and owners (default true).
func WithDigests(on bool) PolicyOption { return func(o *options) { o.digests = on } }

// WithVirtualNodes sets the points per replica on the ring of "consistent_hash" (default 160).
func WithVirtualNodes(n int) PolicyOption { return func(o *options) { o.vnodes = n } }

// WithBound sets how far above the mean number in flight "consistent_hash" lets a replica go (default 1.25; 0 = no bound).
func WithBound(f float64) PolicyOption { return func(o *options) { o.bound = f } }

// WithOutputTokens sets how many tokens to come "least_tokens" assumes for each request in a replica (default 256).
func WithOutputTokens(n int) PolicyOption { return func(o *options) { o.output = float64(n) } }

// PolicyNames lists what NewPolicy knows, the default first.
var PolicyNames = []string{"auto", "p2c", "round_robin", "weighted_round_robin", "random", "least_requests",
	"least_tokens", "ewma", "consistent_hash", "local"}

// NewPolicy returns the policy of that name ("" = auto), or an error that lists the names.
func NewPolicy(name string, opts ...PolicyOption) (Policy, error) {
	o := options{ask: 3, whole: true, vnodes: 160, bound: 1.25, output: 256, digests: true}
	for _, f := range opts {
		f(&o)
	}
	switch name {
	case "", "auto":
		return &auto{o}, nil
	case "p2c":
		return &p2c{}, nil
	case "round_robin":
		return &roundRobin{}, nil
	case "weighted_round_robin":
		return &weightedRoundRobin{}, nil
	case "random":
		return &random{}, nil
	case "least_requests":
		return &leastRequests{}, nil
	case "least_tokens":
		return &leastTokens{o.output}, nil
	case "ewma":
		return &ewma{}, nil
	case "consistent_hash":
		return &consistentHash{vnodes: o.vnodes, bound: o.bound}, nil
	case "local":
		return &local{}, nil
	}
	return nil, fmt.Errorf("unknown policy %q: one of %v", name, PolicyNames)
}

// groupFor returns the replicas that list the request's model; nil = none does.
func (s *Snapshot) groupFor(r *Request) *group {
	if r.Model == "" {
		return s.all
	}
	return s.models[r.Model]
}

// rate fills in the candidate's score for u uncached prompt tokens.
func (c *candidate) rate(s *Snapshot, u float64, now tick) {
	p := c.peer
	l := p.load(c.view, s)
	c.factor = 1
	if x := p.ramp(c.view, s, now); x != 1 {
		c.factor = 1 / x
	}
	if x := p.slowness.Load(); x != 0 {
		c.factor *= p.slowFactor()
	}
	way := p.roundTrip()
	c.extra = way + p.penalty(now)
	c.tokens = int(u)
	cost, first := l.cost(u)
	c.score, c.first = cost*c.factor+c.extra, first+way
}

// marks adds to the terms what the replica's past says.
func (p *Peer) marks(v *view, s *Snapshot, now tick, t *Terms) {
	t.RoundTrip = p.roundTrip()
	t.SlowStart = p.ramp(v, s, now)
	t.Slowness = p.slowFactor()
	t.Penalty = p.penalty(now)
}

// p2c is the power of two choices on gossiped scores: two distinct random replicas, the lower score wins, nobody is asked.
type p2c struct{}

func (*p2c) Name() string { return "p2c" }

func (*p2c) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	g := s.groupFor(r)
	if g == nil {
		return s.none(g, r, now)
	}
	at := s.table.clock.tick(now)
	// The two are kept apart from the list of candidates: this path is the budget's tightest.
	var two [2]candidate
	n := 0
	class := r.class()
	worst := levelOK
	if g.panicking(at) {
		worst = levelSoft
	}
	for tries := 0; n < 2 && tries < 8; tries++ {
		i := intn(rnd, uint64(len(g.entries)))
		e := &g.entries[i]
		if n == 1 && two[0].peer == e.peer || !e.fits(r) {
			continue
		}
		v := e.peer.view.Load()
		if e.level(v, r, at, class) > worst {
			continue
		}
		two[n] = candidate{peer: e.peer, view: v, index: i}
		n++
	}
	reason := ReasonBest
	if n < 2 { // a small group, or few are usable: look at all
		c := candidates{s: s, r: r, g: g, now: at, class: class}
		if worst = c.best(2, rnd); c.n == 0 {
			return s.none(g, r, now)
		}
		n = copy(two[:], c.list[:c.n])
		if n == 1 {
			reason = ReasonOnly
		}
	}
	if worst >= levelSoft {
		reason = ReasonPanic
	}
	for i := range n {
		two[i].rate(s, float64(r.PromptTokens), at)
	}
	b := 0
	if n == 2 && (two[1].score < two[0].score || two[1].score == two[0].score && intn(rnd, 2) == 1) {
		b = 1
	}
	d := Decision{Peer: two[b].peer, Score: two[b].score, First: two[b].first, Tokens: two[b].tokens, Reason: reason}
	if n == 2 {
		d.RunnerUp, d.RunnerUpScore = two[1-b].peer, two[1-b].score
	}
	return d
}

// local never leaves our own replica.
type local struct{}

func (*local) Name() string { return "local" }

func (*local) Pick(s *Snapshot, r *Request, now time.Time, _ *rand.Rand) Decision {
	g := s.groupFor(r)
	if g == nil {
		return s.none(g, r, now)
	}
	for i := range g.entries {
		e := &g.entries[i]
		if !e.peer.self {
			continue
		}
		if l := e.peer.level(e.peer.view.Load(), s.table.clock.tick(now), r.class()); e.fits(r) && l < levelNever && l != levelRefuses {
			c := candidate{peer: e.peer, view: e.peer.view.Load()}
			c.rate(s, float64(r.PromptTokens), s.table.clock.tick(now))
			return Decision{Peer: c.peer, Score: c.score, First: c.first, Tokens: c.tokens, Reason: ReasonSelf}
		}
	}
	return s.none(g, r, now)
}
