package engine

import "time"

// Progress tells how long an engine has had work without doing any: a hung engine keeps its health page at 200. The
// zero value is ready. It judges the engine's own counters; streams that the agent sees moving overrule it.
type Progress struct {
	since time.Time // last movement, zero before the first reading
	last  Reading
}

// Observe takes a reading and returns for how long work has waited or run while no counter moved; 0 if the engine is
// idle, moved, or shows too little to tell. A long prefill moves no counter either: allow for it.
func (p *Progress) Observe(r *Reading, now time.Time) time.Duration {
	busy := r.Running.V > 0 || r.Waiting.V > 0
	counted := r.GenerationTokens.OK || r.PromptTokens.OK || r.FirstTokens.OK
	moved := r.GenerationTokens != p.last.GenerationTokens || r.PromptTokens != p.last.PromptTokens ||
		r.FirstTokens != p.last.FirstTokens || r.PrefixQueries != p.last.PrefixQueries || r.Resets != p.last.Resets ||
		r.KVUsed != p.last.KVUsed // llama.cpp counts tokens when a request ends, but its slots fill while it runs
	if p.since.IsZero() || !busy || !counted || moved {
		p.since = now
	}
	p.last = *r
	return now.Sub(p.since)
}
