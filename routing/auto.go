package routing

import (
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// wholeFleet is up to how many replicas of a model all are considered and asked.
	wholeFleet = MaxAsk
	// stay is how much better another replica must look before we leave our own, in seconds.
	stay = 0.005
	// sticky is what the first owner of a key is favoured by, in seconds, so that later turns meet.
	sticky = 0.002
	// randoms is how many random replicas are considered in a large fleet: on stale data more choices hurt.
	randoms = 4
	// loneRandoms is the same where all arrivals pass here and our books are exact.
	loneRandoms = 10
)

// auto is the full policy: a few candidates, the score in seconds, stay if our own replica is about as good, else ask.
type auto struct{ options }

// autoRoom is what a pick works in. On the stack of the goroutine that asks, it would make that twice as large, and so it
// would stay for as long as the answer takes.
type autoRoom struct {
	c     candidates
	known cachedBlocks
}

var autoRooms = sync.Pool{New: func() any { return new(autoRoom) }}

func (*auto) Name() string { return "auto" }

func (a *auto) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) (d Decision) {
	g := s.groupFor(r)
	if g == nil {
		d.none(s, g, r, now)
		return d
	}
	room := autoRooms.Get().(*autoRoom)
	c, known := &room.c, &room.known
	c.s, c.r, c.g, c.now, c.class, c.n = s, r, g, s.table.clock.tick(now), r.class(), 0
	*known = cachedBlocks{}
	if a.digests && len(r.Prefix) > 0 {
		s.table.index.find(r.Prefix, known)
	}
	owner, worst := -1, levelOK
	if len(g.entries) <= wholeFleet {
		worst = c.best(MaxAsk, rnd)
		if key, ok := a.key(r, known); ok {
			owner, _ = g.ownersOf(key)
		}
	} else {
		if g.panicking(c.now) {
			worst = levelSoft
		}
		owner = a.few(c, known, worst, rnd)
		if c.n == 0 {
			worst = c.best(MaxAsk, rnd)
		}
	}
	if c.n == 0 {
		d.none(s, g, r, now)
	} else {
		a.decide(&d, c, known, owner, worst, rnd)
	}
	autoRooms.Put(room)
	return d
}

// key returns what the rendezvous owners are found by: the first block that is not common in the fleet, else
// the session.
func (a *auto) key(r *Request, known *cachedBlocks) (uint64, bool) {
	switch {
	case !a.digests:
		return 0, false
	case len(r.Prefix) > 0:
		return known.key(r.Prefix), true
	case r.Session != 0:
		return r.Session, true
	}
	return 0, false
}

// few fills the list for a large fleet: ourselves, the holders of most of the prefix (up to eight), its owners, and
// random ones.
// It returns the first owner's index.
func (a *auto) few(c *candidates, known *cachedBlocks, worst level, rnd *rand.Rand) (owner int) {
	owner = -1
	c.add(c.g.self, worst)
	for _, slot := range known.best.slots[:known.best.n()] {
		if p := c.s.table.index.peer(slot); p != nil {
			c.add(c.g.indexOf(p), worst)
		}
	}
	if key, ok := a.key(c.r, known); ok {
		var second int
		owner, second = c.g.ownersOf(key)
		c.add(owner, worst)
		c.add(second, worst)
	}
	d := randoms
	if c.s.lone() {
		d = loneRandoms
	}
	c.draw(d, worst, rnd)
	return owner
}

// none is the decision for nobody.
//
//go:noinline
func (d *Decision) none(s *Snapshot, g *group, r *Request, now time.Time) { *d = s.none(g, r, now) }

// decide scores the candidates, and says in d whom to take or to ask.
func (a *auto) decide(d *Decision, c *candidates, known *cachedBlocks, owner int, worst level, rnd *rand.Rand) {
	s, r := c.s, c.r
	self, hopeful := -1, 0.0
	for i := range c.n {
		x := &c.list[i]
		blocks, sure := 0, true
		if len(r.Prefix) > 0 {
			blocks, sure = s.table.cached(x.peer, r.Prefix, known, c.now)
		}
		x.rate(s, uncached(r, blocks), c.now)
		if x.index == owner {
			x.score -= sticky
			x.extra -= sticky
		}
		most := len(r.Prefix) // nobody told us what it has cached: at best, all
		switch {
		case x.peer.self:
			most = blocks
		case sure:
			most = reach(r.Prefix, blocks)
		}
		best := x.score
		if most > blocks {
			y := *x
			y.rate(s, uncached(r, most), c.now)
			best = y.score
		}
		if i == 0 || best < hopeful {
			hopeful = best
		}
		if x.peer.self {
			self = i
		}
	}
	b := c.lowest(rnd)
	reason := ReasonBest
	switch {
	case worst > levelKept:
		reason = ReasonPanic
	case c.n == 1:
		reason = ReasonOnly
	case c.list[b].peer.self:
		reason = ReasonSelf
	case c.list[b].tokens < r.PromptTokens:
		reason = ReasonPrefix
	}
	if self >= 0 && c.n > 1 && worst <= levelKept && c.list[self].score <= hopeful+stay {
		c.decision(d, self, ReasonSelf)
		return
	}
	if a.ask == 0 || c.n == 1 {
		c.decision(d, b, reason)
		return
	}
	c.decision(d, c.narrow(b, self, owner, rnd), reason)
	a.askList(c, owner, d, rnd)
}

// narrow returns the choice that stands if nobody answers. With a few candidates that is the best of them; where the
// whole fleet was scored it is the best of ourselves, the owner, the holders and two random ones, since everybody's
// argmin over old records is the same replica.
func (c *candidates) narrow(best, self, owner int, rnd *rand.Rand) int {
	if len(c.g.entries) > wholeFleet || c.n <= 3 || c.s.lone() {
		return best
	}
	b := -1
	for i := range c.n {
		x := &c.list[i]
		if i != self && x.index != owner && x.tokens >= c.r.PromptTokens {
			continue
		}
		if b < 0 || x.score < c.list[b].score {
			b = i
		}
	}
	for range 2 {
		if i := intn(rnd, uint64(c.n)); b < 0 || c.list[i].score < c.list[b].score {
			b = i
		}
	}
	return b
}

// decision makes d, which is zero, the choice of candidate i without asking, with the best of the others as runner-up.
func (c *candidates) decision(d *Decision, i int, why Reason) {
	x := &c.list[i]
	d.Peer, d.Score, d.First, d.Tokens, d.Reason = x.peer, x.score, x.first, x.tokens, why
	for k := range c.n {
		if y := &c.list[k]; k != i && (d.RunnerUp == nil || y.score < d.RunnerUpScore) {
			d.RunnerUp, d.RunnerUpScore = y.peer, y.score
		}
	}
}

// askList names those to ask, best first: in a small fleet all, else the best few, ourselves and the key's first owner.
func (a *auto) askList(c *candidates, owner int, d *Decision, rnd *rand.Rand) {
	for i := 1; i < c.n; i++ {
		for k := i; k > 0 && c.list[k].score < c.list[k-1].score; k-- {
			c.list[k], c.list[k-1] = c.list[k-1], c.list[k]
		}
	}
	limit := c.n
	if len(c.g.entries) > wholeFleet || !a.whole {
		limit = min(a.ask, c.n)
	}
	others := 0
	for i := range c.n {
		x := &c.list[i]
		if i >= limit && !x.peer.self && x.index != owner {
			continue
		}
		if !x.peer.self {
			if x.peer.member.Load().Version < AskVersion {
				continue
			}
			others++
		}
		d.Ask[d.Asks], d.AskScore[d.Asks], d.AskTokens[d.Asks] = x.peer, x.score, x.tokens
		d.askFactor[d.Asks], d.askExtra[d.Asks], d.askFirst[d.Asks] = x.factor, x.extra, x.first
		d.Asks++
	}
	if others == 0 {
		d.Asks = 0
	}
	d.table, d.at = c.s.table, c.now
	d.draw(rnd)
}
