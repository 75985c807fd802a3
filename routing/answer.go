package routing

import "time"

// Answer returns our own exact cost for a request that a peer asks about, in seconds, and how many prompt tokens we
// must compute for it: what the own books say now, with the own digest. What the asker knows itself (round trip, slow
// start, failures it saw) it adds itself, in Settle. OK is false if we take nothing of that class now. It counts nothing.
func (t *Table) Answer(r *Request, now time.Time) Answer {
	s := t.Snapshot()
	v := t.self.view.Load()
	level := t.self.level(v, t.clock.tick(now), r.class())
	if level >= levelRefuses {
		return Answer{}
	}
	blocks := 0
	if d := t.own.Load(); d != nil && len(r.Prefix) > 0 {
		blocks = d.Match(r.Prefix)
	}
	u := uncached(r, blocks)
	l := t.self.load(v, s)
	a := Answer{Tokens: int(u), OK: true}
	a.Score, a.First = l.cost(u)
	if level == levelFull {
		a.Score += fullSeconds
	}
	return a
}

// Candidate is one replica in an explanation.
type Candidate struct {
	Peer     *Peer
	Excluded string // why it may not be picked; "" = it may
	Health   Health
	Cached   int // prompt tokens believed to be cached there
	Terms    Terms
	Score    float64 // seconds
}

// Explain says what a request would cost at every member and who is out and why; it is for people, not for picks.
func (s *Snapshot) Explain(r *Request, now time.Time) []Candidate {
	at := s.table.clock.tick(now)
	g := s.groupFor(r)
	var known cachedBlocks
	s.table.index.find(r.Prefix, &known)
	out := make([]Candidate, 0, len(s.peers))
	for _, p := range s.peers {
		v := p.view.Load()
		blocks, _ := s.table.cached(p, r.Prefix, &known, at)
		u := uncached(r, blocks)
		l := p.load(v, s)
		t := l.terms(u)
		p.marks(v, s, at, &t)
		c := Candidate{Peer: p, Health: p.Health(now), Cached: r.PromptTokens - int(u), Terms: t, Score: t.Total()}
		i := -1
		if g != nil {
			i = g.indexOf(p)
		}
		switch {
		case i < 0:
			c.Excluded = "does not list the model"
		case r.tried(p.boot):
			c.Excluded = "tried before"
		case r.Local && !p.self:
			c.Excluded = "must stay here"
		case !g.entries[i].fits(r):
			c.Excluded = "does not serve this path"
		default:
			c.Excluded = g.entries[i].level(v, r, at, r.class()).excludes()
		}
		out = append(out, c)
	}
	return out
}

// excludes says in words why a level is not picked while a better one is there.
func (l level) excludes() string {
	switch l {
	case levelOK:
		return ""
	case levelFull:
		return "no KV space and no free GPU memory"
	case levelKept:
		return "kept for other classes"
	case levelSoft:
		return "put aside for a time"
	case levelRefuses:
		return "refuses this class now"
	case levelDead:
		return "known dead"
	case levelShort:
		return "the prompt is longer than its context"
	}
	return "takes no requests in its state"
}
