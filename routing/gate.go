package routing

import (
	"math"
	"time"
)

// The constants of the gate, see Gate.Room.
const (
	// gateAhead is how much prefill, in time, the engine is given ahead, so that it never runs dry before the next
	// request reaches it: one engine step and the way there. gateMost is the same in prompt tokens, about a tenth of
	// the budget of a large engine's step; gateLeast keeps short prompts together. Where a step takes longer than that,
	// gateSteps steps' worth is given: with many short prompts (ServeGen m-large, 85 % load, simulated) less lets steps
	// begin unfilled, 87 ms to the first token with one step's worth, 73 with one and a half.
	gateAhead = 30 * time.Millisecond
	gateMost  = 800 // prompt tokens
	// gateShort is how much prefill is always let through: what the engine works off so fast gains nothing by waiting, and
	// holding it back costs a timer and two wake-ups a request. It counts above 160,000 prompt tokens/s only.
	gateShort = 5 * time.Millisecond
	gateLeast = 64 // prompt tokens
	gateSteps = 1.5
	// gateBudget is what a large engine takes in one step. A request that has waited GatePatience without being moved
	// is in a saturated fleet, where holding back gains nothing and full steps are what counts: up to then the limit
	// grows to the whole budget, or to 750 ms of prefill where that is more.
	// (A fleet with cold caches at 85 % load, simulated: 420 ms to the first token with one step's worth, 297 with two, 213
	// with 750 ms, 170 without a gate: the step under way counts as pending until it ends, and prompts do not fill it.)
	gateBudget   = 8192                   // prompt tokens
	gateMuch     = 750 * time.Millisecond // of prefill
	gateShared   = 1.3                    // times what is given at once, where slots are kept free for higher classes
	GatePatience = 500 * time.Millisecond
	// gateFullKV is the share of the KV cache from which on an engine with work gets nothing more.
	gateFullKV = 0.97
)

// Gate is what an agent knows of its own engine when it decides whether to hold a request back.
type Gate struct {
	AtEngine   int          // requests there, running ones included, that did not only pass by
	Foreign    int          // requests there that came around the agent
	Pending    int          // prompt tokens there without a first token
	Entered    int          // prompt tokens let in since KVUsed was read
	Rate       float64      // prompt tokens/s
	Step       float64      // of decoding, s; 0 = unknown
	RunLimit   Opt[int]     // most requests it runs at once
	Reserve    int          // … of which so many are kept free for higher classes, see Reserve
	KVUsed     Opt[float64] // 0..1
	KVCapacity Opt[int]     // tokens
}

// Room reports whether the engine could start a request of that many prompt tokens now that has been held for waited:
// a slot is free, the KV cache has room, and at most so many prompt tokens are pending:
//
//	max(min(max(30 ms·R, 64), 800), min(1.5·step·R, 8192), 5 ms·R), growing to max(8192, 750 ms·R) while it waits 0.5 s
//
// Where slots are kept free for higher classes it grows by a third: what is in the engine's own queue goes before them.
func (g *Gate) Room(tokens int, waited time.Duration) bool {
	if g.AtEngine+g.Foreign == 0 {
		return true // nothing is there: whatever the pages say, it cannot get better
	}
	patience := min(1, max(0, waited.Seconds()/GatePatience.Seconds()))
	least := max(min(max(g.Rate*gateAhead.Seconds(), gateLeast), gateMost), min(g.Rate*gateSteps*g.Step, gateBudget),
		g.Rate*gateShort.Seconds())
	most := max(gateBudget, g.Rate*gateMuch.Seconds())
	if g.Reserve > 0 {
		most = min(most, gateShared*least)
	}
	if float64(g.Pending) > least+patience*(most-least) {
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
