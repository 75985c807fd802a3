package proxy

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// shadow is the mode in which every request goes to the own engine, while each pick is made and its gain predicted, so
// that the effect of routing can be seen before it is switched on.
//
// What would have moved would have changed the queues that later picks see. Each replica's books therefore get a
// correction delta, in prompt tokens: a moved request adds its tokens there and takes them away here. The queue that would
// be there is Q' = max(0, Q + delta), and both queues drain at the rate R while they are not empty:
//
//	delta > 0 and Q = 0:   delta falls by R a second, to 0    (only the queue that would be has work)
//	delta < 0 and Q' = 0:  delta rises by R a second, to 0    (only the real one has work)
//
// Other agents' moves are not seen here; each agent predicts for the requests that enter at it.
type shadow struct {
	on atomic.Bool

	mu    sync.Mutex
	since time.Time
	delta map[uint64]*shadowQueue
	counts
}

type counts struct {
	picks, moved        uint64  // since start
	n                   uint64  // since shadow mode began
	here, there         float64 // s, predicted times to first token of these, as they were and as they would have been
	measured, predicted float64 // s, of those whose first content was seen
}

// shadowQueue is one replica's correction.
type shadowQueue struct {
	delta float64 // prompt tokens
	at    time.Time
}

// ShadowCounts is what shadow mode has found.
type ShadowCounts struct {
	On           bool
	Picks, Moved uint64               // since start: requests looked at, and those that would have gone elsewhere
	TTFT         routing.Opt[float64] // s, predicted mean of the requests since shadow mode began, as they were
	Gain         routing.Opt[float64] // s, by how much it would have been shorter
	Since        time.Time            // when shadow mode began; zero if it never did
}

// SetShadow switches shadow mode; requests under way end as they began.
func (p *Proxy) SetShadow(on bool, now time.Time) {
	s := &p.shadow
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.on.Swap(on) == on {
		return
	}
	if on {
		s.since, s.delta = now, map[uint64]*shadowQueue{}
		s.counts = counts{picks: s.picks, moved: s.moved}
	}
}

// Shadow returns what shadow mode has found; it stays after the mode has ended.
func (p *Proxy) Shadow() ShadowCounts {
	s := &p.shadow
	s.mu.Lock()
	defer s.mu.Unlock()
	c := ShadowCounts{On: s.on.Load(), Picks: s.picks, Moved: s.moved, Since: s.since}
	if s.n > 0 {
		k := s.scale() / float64(s.n)
		c.TTFT, c.Gain = routing.Some(s.here*k), routing.Some((s.here-s.there)*k)
	}
	return c
}

// shadowTrust is how many first tokens must have been seen before predictions are scaled by them.
const shadowTrust = 20

// scale is how much longer first tokens took than predicted: what the model leaves out (decoding beside prefill, limits
// of the batch) stretches both worlds alike.
func (c *counts) scale() float64 {
	if c.n < shadowTrust || c.predicted <= 0 {
		return 1
	}
	return min(max(c.measured/c.predicted, 0.2), 5)
}

// shadowNote is what a pick in shadow mode found; it goes into the record of the request.
type shadowNote struct {
	made        bool
	here, there float64 // s
}

// note makes the pick that d stands for in the world that would be. d is the policy's decision from the real books; the
// policy auto would see the corrected ones. It returns the replica that the request would go to.
func (s *shadow) note(snap *routing.Snapshot, r *routing.Request, d routing.Decision, auto bool, now time.Time) (to *routing.Peer, n shadowNote) {
	list := snap.Explain(r, now)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.delta == nil {
		s.delta = map[uint64]*shadowQueue{}
	}
	var best, self *routing.Candidate
	var there, selfThere float64
	for i := range list {
		c := &list[i]
		ttft := s.would(r, c, now)
		if c.Peer.Self() {
			self, selfThere = c, ttft
			n.here = (c.Terms.Queue + c.Terms.Prefill) * c.Terms.Slowness / c.Terms.SlowStart
		}
		pick := c.Excluded == "" && auto || !auto && c.Peer == d.Peer
		if pick && (best == nil || ttft < there) {
			best, there = c, ttft
		}
	}
	if self == nil {
		return nil, shadowNote{}
	}
	if best == nil {
		best, there = self, selfThere
	}
	n.made, n.there = true, there
	s.picks++
	s.n++
	s.here += n.here
	s.there += n.there
	if best != self {
		s.moved++
		s.queue(best.Peer, now).delta += float64(r.PromptTokens - best.Cached)
		s.queue(self.Peer, now).delta -= float64(r.PromptTokens - self.Cached)
	}
	return best.Peer, n
}

// would returns when the request's first token would come at c with the corrected queue, in s. The harm to others and the
// pressure on memory are left out: the books have them as they are, not as they would be.
func (s *shadow) would(r *routing.Request, c *routing.Candidate, now time.Time) float64 {
	t := c.Terms
	queue := t.Queue
	if u := float64(r.PromptTokens - c.Cached); u > 0 && t.Prefill > 0 {
		rate := u / t.Prefill
		q := s.queue(c.Peer, now)
		q.drain(t.Queue*rate, rate, now)
		queue = max(0, t.Queue*rate+q.delta) / rate
	}
	return (queue+t.Prefill)*t.Slowness/t.SlowStart + t.RoundTrip + t.Penalty
}

func (s *shadow) queue(p *routing.Peer, now time.Time) *shadowQueue {
	q := s.delta[p.Boot()]
	if q == nil {
		if len(s.delta) > 4096 { // of members that left long ago
			clear(s.delta)
		}
		q = &shadowQueue{at: now}
		s.delta[p.Boot()] = q
	}
	return q
}

// drain moves the correction on to now, where the real queue is have tokens long.
func (q *shadowQueue) drain(have, rate float64, now time.Time) {
	work := rate * now.Sub(q.at).Seconds()
	q.at = now
	switch {
	case q.delta > 0 && have < 1:
		q.delta = max(0, q.delta-work)
	case q.delta < 0 && have+q.delta < 1:
		q.delta = min(0, q.delta+work)
		q.delta = max(q.delta, -have)
	}
}

// seen takes the measured time to the first token of a request that shadow mode looked at.
func (s *shadow) seen(n shadowNote, took time.Duration) {
	if !n.made {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.measured += took.Seconds()
	s.predicted += n.here
}

// shadowPick keeps the request here and notes where it would have gone. Nobody is asked and nothing can move it.
func (x *exchange) shadowPick(s *routing.Snapshot, d *routing.Decision, now time.Time) choice {
	if len(x.tried) > 0 {
		return choice{Reason: routing.ReasonAllTried} // there is nobody else in this mode
	}
	to, n := x.p.shadow.note(s, &x.req, *d, x.p.cfg.Policy.Name() == "auto", now)
	x.shadowed, x.fixed = n, true
	if to != nil {
		x.rec.Shadow, x.rec.ShadowHereMS, x.rec.ShadowThereMS = to.Member().Node, n.here*1000, n.there*1000
	}
	return choice{Peer: s.Self(), Tokens: x.req.PromptTokens, Score: n.here, First: n.here, Reason: routing.ReasonShadow}
}
