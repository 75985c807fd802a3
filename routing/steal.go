package routing

import (
	"math/rand/v2"
	"time"
)

// The constants of stealing.
const (
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

// Thief is what an idle agent says of itself when it pulls.
type Thief struct {
	Pending   int           // uncached prompt tokens at its engine and under way to it
	Running   int           // requests in its batch
	Rate      float64       // prompt tokens/s
	RoundTrip time.Duration // between thief and victim
	Lowest    uint8         // lowest class that it could start now; 0 = any
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
