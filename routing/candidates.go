package routing

import "math/rand/v2"

// candidate is a replica under consideration for one request.
type candidate struct {
	peer   *Peer
	view   *view
	level  level
	index  int // in its group
	tokens int // prompt tokens that it must compute
	score  float64
	first  float64 // when its first token would come, s
	factor float64 // of slow start and slowness
	extra  float64 // round trip and penalty, s
}

// candidates is the few replicas that one pick looks at; it lives on the stack.
type candidates struct {
	s     *Snapshot
	r     *Request
	g     *group
	now   tick
	class uint8
	list  [MaxAsk]candidate
	n     int
}

// fits reports whether the request may go to the entry at all, whatever its state.
func (e *entry) fits(r *Request) bool {
	return (r.Service == 0 || e.serves == 0 || e.serves&r.Service != 0) && !r.tried(e.boot) && (!r.Local || e.peer.self)
}

// level returns how fit the entry is for the request.
func (e *entry) level(v *view, r *Request, now tick, class uint8) level {
	l := e.peer.level(v, now, class)
	if e.context > 0 && r.PromptTokens+r.MaxTokens > e.context { // vLLM refuses what could grow beyond
		return max(l, levelShort)
	}
	return l
}

// add takes entry i of the group if it is fit enough and not in the list yet. It reports whether it did.
func (c *candidates) add(i int, worst level) bool {
	if i < 0 || c.n == len(c.list) {
		return false
	}
	e := &c.g.entries[i]
	for k := range c.n {
		if c.list[k].peer == e.peer {
			return false
		}
	}
	if !e.fits(c.r) {
		return false
	}
	v := e.peer.view.Load()
	l := e.level(v, c.r, c.now, c.class)
	if l > worst {
		return false
	}
	c.list[c.n] = candidate{peer: e.peer, view: v, level: l, index: i}
	c.n++
	return true
}

// draw adds up to d random entries that are fit enough.
func (c *candidates) draw(d int, worst level, rnd *rand.Rand) {
	n := uint64(len(c.g.entries))
	for tries := 0; d > 0 && tries < 16; tries++ {
		if c.add(intn(rnd, n), worst) {
			d--
		}
	}
}

// best fills the list from the whole group with entries of its best level, in a panic also with those that are only
// put aside; where there are more than fit, with a random choice of them. It returns that level.
func (c *candidates) best(limit int, rnd *rand.Rand) level {
	count := c.g.count(c.r, c.now, c.class)
	worst := count.worst(c.r)
	if worst == levelNever {
		return worst
	}
	seen := 0
	for i := range c.g.entries {
		e := &c.g.entries[i]
		if !e.fits(c.r) {
			continue
		}
		v := e.peer.view.Load()
		l := e.level(v, c.r, c.now, c.class)
		if l > worst {
			continue
		}
		seen++
		k := c.n
		if c.n < limit {
			c.n++
		} else if k = intn(rnd, uint64(seen)); k >= limit {
			continue
		}
		c.list[k] = candidate{peer: e.peer, view: v, level: l, index: i}
	}
	return worst
}

// levels counts a group's members by level.
type levels [levelNever + 1]int

// count returns how many entries that fit the request are at each level.
func (g *group) count(r *Request, now tick, class uint8) levels {
	var n levels
	for i := range g.entries {
		e := &g.entries[i]
		if e.fits(r) {
			n[e.level(e.peer.view.Load(), r, now, class)]++
		}
	}
	return n
}

// worst returns up to which level members may be picked: the best level that has any, in a panic also those that are
// only put aside. levelNever means that none may.
func (n *levels) worst(r *Request) level {
	best := levelNever
	for l := range levelNever {
		if n[l] > 0 {
			best = l
			break
		}
	}
	if best == levelRefuses || best == levelKept && (n[levelRefuses] > 0 || r.Full) {
		return levelNever // those that are kept are not there for what is too much for the others
	}
	usable := n[levelOK] + n[levelFull] + n[levelKept] + n[levelRefuses]
	if best < levelSoft && panics(usable, usable+n[levelSoft]+n[levelDead]) {
		return levelSoft
	}
	return best
}

// panics reports whether too few of the replicas that are not leaving are usable.
func panics(usable, members int) bool { return members >= 3 && usable*2 < members }

// intn draws from 0..n-1; 0 without a source, so that ties and draws go by order.
func intn(rnd *rand.Rand, n uint64) int {
	if rnd == nil || n == 0 {
		return 0
	}
	return int((rnd.Uint64() >> 32) * n >> 32)
}

// lowest returns the index of the candidate with the lowest score; ties go to a random one.
func (c *candidates) lowest(rnd *rand.Rand) int {
	b, ties := 0, uint64(1)
	for i := 1; i < c.n; i++ {
		switch x, y := c.list[i].score, c.list[b].score; {
		case x < y:
			b, ties = i, 1
		case x == y:
			ties++
			if rnd != nil && intn(rnd, ties) == 0 {
				b = i
			}
		}
	}
	return b
}
