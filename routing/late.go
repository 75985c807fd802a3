package routing

import (
	"math"
	"math/rand/v2"
	"time"
)

// Late binding (design section 5.3 and 5.4) as pure decisions: when the gate lets a request through, whom an idle agent
// pulls from, and which of its held requests the victim gives. The proxy and the simulator both run this code.
const (
	// gateAhead is how much prefill, in time, the engine is given ahead, so that it never runs dry before the next
	// request reaches it: one engine step and the way there. gateMost is the same in prompt tokens, about a tenth of
	// the budget of a large engine's step; gateLeast keeps short prompts together.
	gateAhead = 30 * time.Millisecond
	gateMost  = 800 // prompt tokens
	gateLeast = 64  // prompt tokens
	// gateBudget is what a large engine takes in one step. A request that has waited GatePatience without being moved
	// is in a saturated fleet, where holding back gains nothing and full steps are what counts: up to then the limit
	// grows to the whole budget.
	gateBudget   = 8192 // prompt tokens
	GatePatience = 500 * time.Millisecond
	// gateFullKV is the share of the KV cache from which on an engine with work gets nothing more.
	gateFullKV = 0.97

	// StealLook is how many held requests a victim looks at, in the order of their turns.
	StealLook = 16
	// stealFactor, stealSlack and stealLost say how much better off a request must be at the thief.
	stealFactor = 1.1
	stealSlack  = 0.005 // s
	stealLost   = 3.0   // times the prefix work that staying would have saved
	stealFullKV = 0.1   // s that staying costs more where the KV cache is full
	// stealRandom: every so many pulls go to a random holder, so that idle agents do not all meet at one.
	stealRandom = 3
)

// Gate is what an agent knows of its own engine when it decides whether to hold a request back.
type Gate struct {
	AtEngine   int          // requests there, running ones included, that did not only pass by
	Foreign    int          // requests there that came around the agent
	Pending    int          // prompt tokens there without a first token
	Entered    int          // prompt tokens let in since KVUsed was read
	Rate       float64      // prompt tokens/s
	RunLimit   Opt[int]     // most requests it runs at once
	KVUsed     Opt[float64] // 0..1
	KVCapacity Opt[int]     // tokens
}

// Room reports whether the engine could start a request of that many prompt tokens now that has been held for waited.
func (g *Gate) Room(tokens int, waited time.Duration) bool {
	if g.AtEngine+g.Foreign == 0 {
		return true // nothing is there: whatever the pages say, it cannot get better
	}
	patience := min(1, max(0, waited.Seconds()/GatePatience.Seconds()))
	least := min(max(g.Rate*gateAhead.Seconds(), gateLeast), gateMost)
	if float64(g.Pending) > least+patience*(gateBudget-least) {
		return false
	}
	if n := g.RunLimit.V; g.RunLimit.OK && n > 0 {
		// Behind the last slot one eighth more, so that a step that ends many finds as many to begin.
		slack := int(patience * math.Max(1, float64(n)/8))
		if g.AtEngine+g.Foreign >= n+slack {
			return false
		}
	}
	return patience >= 1 || !g.FullKV(tokens)
}

// FullKV reports whether the KV cache has no room for that many more tokens, as far as the engine's pages say.
func (g *Gate) FullKV(tokens int) bool {
	if !g.KVUsed.OK {
		return false
	}
	used := g.KVUsed.V
	if g.KVCapacity.V > 0 {
		used += float64(g.Entered+tokens) / float64(g.KVCapacity.V)
	}
	return used >= gateFullKV
}

// Thief is what an idle agent says of itself when it pulls.
type Thief struct {
	Pending   int           // uncached prompt tokens at its engine and under way to it
	Running   int           // requests in its batch
	Rate      float64       // prompt tokens/s
	RoundTrip time.Duration // between thief and victim
}

// Held is one held request and what is before it at the victim.
type Held struct {
	Before int     // uncached prompt tokens at the victim's engine, and of those held before it
	Here   int     // its own uncached prompt tokens at the victim
	There  int     // … at the thief
	Rate   float64 // of the victim, prompt tokens/s
	FullKV bool    // the victim's KV cache is full
}

// WorthMoving reports whether a held request is surely better off at the thief:
//
//	(Before + Here)/R + 0.1 s if full > 1.1·((Pending + There)/R' + round trip) + 5 ms + 3·max(0, There − Here)/R'·(1 + 0.05·Running)
//
// The last term is the prefix work that moving throws away: without it stealing tears affinity apart.
func (t *Thief) WorthMoving(h Held) bool {
	if t.Rate <= 0 || h.Rate <= 0 {
		return false
	}
	stay := float64(h.Before+h.Here) / h.Rate
	if h.FullKV {
		stay += stealFullKV
	}
	leave := stealFactor * (float64(t.Pending+h.There)/t.Rate + t.RoundTrip.Seconds())
	if lost := h.There - h.Here; lost > 0 {
		leave += stealLost * float64(lost) / t.Rate * (1 + harmRunning*float64(t.Running))
	}
	return stay > leave+stealSlack
}

// Victim returns the peer that an idle agent should pull a held request from: the one whose newest record shows the
// most held tokens, every third time by random any of those that hold some; nil if no record shows any.
func (s *Snapshot) Victim(now time.Time, rnd *rand.Rand) *Peer {
	at := s.table.clock.tick(now)
	random := intn(rnd, stealRandom) == 0 && rnd != nil
	var best *Peer
	most, n := 0, uint64(0)
	for _, p := range s.peers {
		v := p.view.Load()
		if p.self || v == nil || v.report.Held.V == 0 || v.level >= levelDead || at > v.stale || p.member.Load().Version < AskVersion {
			continue
		}
		n++
		switch tokens := v.report.HeldTokens.V; {
		case random:
			if intn(rnd, n) == 0 {
				best = p
			}
		case best == nil || tokens > most:
			best, most = p, tokens
		}
	}
	return best
}

// Uncached returns how many of the request's prompt tokens p must compute, by our own digest or by the newest that p
// has sent.
func (t *Table) Uncached(p *Peer, r *Request, now time.Time) int {
	if len(r.Prefix) == 0 {
		return r.PromptTokens
	}
	var known cachedBlocks
	if !p.self || t.own.Load() == nil {
		t.index.find(r.Prefix, &known)
	}
	blocks, _ := t.cached(p, r.Prefix, &known, t.clock.tick(now))
	return int(uncached(r, blocks))
}
