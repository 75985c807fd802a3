package routing

import (
	"math"
	"time"
)

// The constants of the gate, see Gate.Room.
const (
	// gateSteps is what holding a request back costs it, in steps of the engine: it misses the next one, and half of another
	// passes until the agent has heard that it has ended. gateAhead is the least of that, and counts where no step is known.
	gateSteps = 1.5
	gateAhead = 30 * time.Millisecond
	// gateShort is how much prefill is always let through: what the engine works off so fast gains nothing by waiting, and
	// holding it back costs a timer and two wake-ups a request.
	gateShort = 5 * time.Millisecond
	// gateBudget is what a large engine takes in one step. A request that has waited GatePatience without being moved
	// is in a saturated fleet, where holding back gains nothing and full steps are what counts: up to then the limit
	// grows to the whole budget, or to 750 ms of prefill where that is more.
	// (A fleet with cold caches at 85 % load, simulated: 420 ms to the first token with one step's worth, 297 with two, 213
	// with 750 ms, 170 without a gate: the step under way counts as pending until it ends, and prompts do not fill it.)
	gateBudget   = 8192                   // prompt tokens
	gateMuch     = 750 * time.Millisecond // of prefill
	gateShared   = 1.3                    // times the cost of holding back, where slots are kept free for higher classes
	GatePatience = 500 * time.Millisecond
	// gateFullKV is the share of the KV cache from which on an engine with work gets nothing more.
	gateFullKV = 0.97
)

// Gate is what an agent knows of its own engine when it decides whether to hold a request back.
type Gate struct {
	AtEngine   int          // requests there, running ones included, that did not only pass by
	Foreign    int          // requests there that came around the agent
	Prompts    int          // requests there without a first token
	Pending    int          // their prompt tokens
	Behind     int          // requests held whose turn comes after this one's
	Entered    int          // prompt tokens let in since KVUsed was read
	Rate       float64      // prompt tokens/s
	Step       float64      // of decoding, s; 0 = unknown
	RunLimit   Opt[int]     // most requests it runs at once
	Reserve    int          // … of which so many are kept free for higher classes, see Reserve
	KVUsed     Opt[float64] // 0..1
	KVCapacity Opt[int]     // tokens
}

// Room reports whether the engine could start a request of that many prompt tokens, 0 = any, now that has been held for
// waited: a slot is free, the KV cache has room, and prompts that are pending there are nearly done, or gain by its joining
// them. Prompts of one step end together, so it delays those by its own time and saves itself, and all that are held behind
// it, what holding back costs:
//
//	Pending ≤ 5 ms·R, or Pending ≤ 8192 and Prompts·tokens ≤ max(30 ms, 1.5·step)·R·(1 + Behind)
//
// Either limit of Pending grows to max(8192, 750 ms·R) while the request waits 0.5 s; where slots are kept free for higher
// classes it is at most 1.3·max(30 ms, 1.5·step)·R: what is in the engine's own queue goes before them.
func (g *Gate) Room(tokens int, waited time.Duration) bool {
	if g.AtEngine+g.Foreign == 0 {
		return true // nothing is there: whatever the pages say, it cannot get better
	}
	patience := min(1, max(0, waited.Seconds()/GatePatience.Seconds()))
	cost := g.Rate * max(gateAhead.Seconds(), gateSteps*g.Step) // of holding back, in prompt tokens
	limit := g.Rate * gateShort.Seconds()
	if tokens > 0 && float64(g.Prompts)*float64(tokens) <= cost*float64(1+g.Behind) {
		limit = max(limit, gateBudget)
	}
	limit += patience * (max(gateBudget, g.Rate*gateMuch.Seconds()) - limit)
	if g.Reserve > 0 {
		limit = min(limit, gateShared*cost)
	}
	if float64(g.Pending) > limit {
		return false
	}
	if n := g.RunLimit.V; g.RunLimit.OK && n > 0 {
		// Behind the last slot one eighth more, so that a step that ends many finds as many to begin.
		slack := int(patience * math.Max(1, float64(n)/8))
		if g.Reserve > 0 {
			slack = -g.Reserve
		}
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
