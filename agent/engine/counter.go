package engine

import "github.com/grapevine-lb/grapevine/routing"

// Increase is how far a counter moved from prev to cur. A counter that went back was reset by a restart of the
// engine and has moved from zero. Unknown if either is.
func Increase(prev, cur routing.Opt[float64]) routing.Opt[float64] {
	if !prev.OK || !cur.OK {
		return routing.Opt[float64]{}
	}
	if cur.V < prev.V {
		return cur
	}
	return routing.Some(cur.V - prev.V)
}

// restarted tells whether cur comes from a later life of the engine than prev: a counter went back, or the process
// has another start time.
func restarted(prev, cur *Reading) bool {
	back := func(a, b routing.Opt[float64]) bool { return a.OK && b.OK && b.V < a.V }
	if p, c := prev.ProcessStart, cur.ProcessStart; p.OK && c.OK && p.V != c.V {
		return true
	}
	return back(prev.GenerationTokens, cur.GenerationTokens) || back(prev.PromptTokens, cur.PromptTokens) ||
		back(prev.FirstTokens, cur.FirstTokens) || back(prev.PrefixQueries, cur.PrefixQueries)
}

// keep remembers the counters for the next comparison; one that is unknown for a while keeps its old value.
func keep(counters, rd *Reading) {
	old := *counters
	*counters = *rd
	for _, c := range []struct{ old, cur *routing.Opt[float64] }{
		{&old.GenerationTokens, &counters.GenerationTokens}, {&old.PromptTokens, &counters.PromptTokens},
		{&old.FirstTokens, &counters.FirstTokens}, {&old.PrefixQueries, &counters.PrefixQueries},
		{&old.ProcessStart, &counters.ProcessStart},
	} {
		if !c.cur.OK {
			*c.cur = *c.old
		}
	}
}
