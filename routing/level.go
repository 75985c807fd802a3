package routing

// level says how fit a replica is for new requests; lower is better. A pick takes from the best level that has any.
type level uint8

const (
	levelOK      level = iota
	levelFull          // KV cache full and no free GPU memory: only if no other is usable
	levelKept          // kept for requests of other classes: only if no other is usable, nor merely full of this class
	levelSoft          // put aside: ejected, held off, suspect, stale; let in again in a panic
	levelRefuses       // it says that it refuses this class now; if nothing better is left, that is a 429 and no try
	levelDead          // its own agent says so, or it refused a connection just now: only if nothing else is left
	levelShort         // its context is shorter than the prompt's estimate: its engine will say so in its own words
	levelNever         // starting, warming, asleep, draining, gone
)

// fullKV and fullGPU are the shares from which on a replica gets nothing while another is usable. Full GPU memory
// alone is normal for an engine that preallocates its cache, and a full cache alone still preempts; both together
// mean that there is no room anywhere.
const (
	fullKV  = 0.98
	fullGPU = 0.95
)

// level returns what a record alone says.
func (r *Report) level() level {
	switch {
	case r.Goodbye, r.Flags&FlagDraining != 0:
		return levelNever
	case r.Flags&FlagEngineDown != 0:
		return levelDead
	}
	switch r.State {
	case StateStarting, StateWarming, StateAsleep, StateDraining, StateGone:
		return levelNever
	case StateSuspect, StateEjected:
		return levelSoft
	}
	switch {
	case r.Flags&FlagWarming != 0:
		return levelNever
	case r.Flags&(FlagSuspect|FlagGPUTrouble) != 0:
		return levelSoft
	case r.KVUsed.OK && r.KVUsed.V >= fullKV && r.GPUMemoryUsed.OK && r.GPUMemoryUsed.V > fullGPU:
		return levelFull
	case r.Flags&FlagSaturated != 0 && r.LowestClass == 0:
		return levelRefuses
	}
	return levelOK
}

// level returns how fit the peer is for a request of that class at now.
func (p *Peer) level(v *view, now tick, class uint8) level {
	if v == nil {
		if p.self {
			return levelOK // nobody reports to ourselves; the engine will say
		}
		return levelSoft
	}
	l := v.level
	if l >= levelDead {
		return l
	}
	switch {
	case now < tick(p.deadUntil.Load()):
		return levelDead
	case now > v.stale && !p.self: // what it refuses may be long over
		return max(l, levelSoft)
	case v.lowest != 0 && class > v.lowest:
		return max(l, levelRefuses)
	case now < tick(p.softUntil.Load()), p.trial.Load() == trialRunning:
		return max(l, levelSoft)
	case !v.report.Kept.Has(class):
		return max(l, levelKept)
	}
	return l
}
