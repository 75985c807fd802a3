package routing

import "time"

// Health is a replica's state as we see it.
type Health struct {
	State State     `json:"state"`
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
	// EjectedUntil is when an ejection of ours ends; zero if there is none.
	EjectedUntil time.Time `json:"ejected_until,omitzero"`
}

// facts is all that a replica's state follows from.
type facts struct {
	removed bool // the member left, failed or was reaped
	ejected bool // by what we saw ourselves
	slow    bool // … because it is slow
	refused bool // it refused a connection, and no record came since
	stale   bool // no record for three heartbeats
	report  *Report
}

// rule gives the state of the replicas that it fits.
type rule struct {
	state State
	why   string
	fits  func(*facts) bool
}

// rules is the state machine of a replica: the first rule that fits gives its state. What the replica's own agent
// says goes before what we saw, since it knows more, and every mark of ours ends by the clock.
var rules = []rule{
	{StateGone, "member left or failed", func(f *facts) bool { return f.removed }},
	{StateGone, "said goodbye", func(f *facts) bool { return f.report != nil && f.report.Goodbye }},
	{StateUnknown, "no record yet", func(f *facts) bool { return f.report == nil && !f.ejected && !f.refused }},
	{StateDraining, "its agent is draining", func(f *facts) bool {
		return f.report != nil && (f.report.Flags&FlagDraining != 0 || f.report.State == StateDraining)
	}},
	{StateSuspect, "its agent says that the engine is down", func(f *facts) bool { return f.has(FlagEngineDown) }},
	{StateStarting, "the engine does not answer yet", func(f *facts) bool { return f.says(StateStarting) }},
	{StateWarming, "the warm-up request is under way", func(f *facts) bool { return f.says(StateWarming) || f.has(FlagWarming) }},
	{StateAsleep, "the engine sleeps", func(f *facts) bool { return f.says(StateAsleep) }},
	{StateEjected, "much slower than its peers", func(f *facts) bool { return f.ejected && f.slow }},
	{StateEjected, "failed requests that we sent", func(f *facts) bool { return f.ejected }},
	{StateSuspect, "refused a connection", func(f *facts) bool { return f.refused }},
	{StateSuspect, "no record for three heartbeats", func(f *facts) bool { return f.stale }},
	{StateSuspect, "its agent saw hard failures in a row", func(f *facts) bool { return f.has(FlagSuspect) || f.says(StateSuspect) }},
	{StateSuspect, "GPU trouble", func(f *facts) bool { return f.has(FlagGPUTrouble) }},
	{StateReady, "its agent says so", func(*facts) bool { return true }},
}

func (f *facts) has(x Flags) bool  { return f.report != nil && f.report.Flags&x != 0 }
func (f *facts) says(s State) bool { return f.report != nil && f.report.State == s }

// state returns the first rule that fits.
func (f *facts) state() (State, string) {
	for i := range rules {
		if rules[i].fits(f) {
			return rules[i].state, rules[i].why
		}
	}
	panic("routing: the last rule fits all")
}

// facts gathers what the state follows from at now.
func (p *Peer) facts(now tick) facts {
	f := facts{
		removed: p.gone.Load(),
		ejected: now < tick(p.ejected.Load()),
		slow:    p.ejectedSlow,
		refused: now < tick(p.deadUntil.Load()),
	}
	if v := p.view.Load(); v != nil {
		f.report = &v.report
		f.stale = !p.self && now > v.stale
	}
	return f
}

// refresh notes a change of state; the owner's lock is held. A change by the clock alone is noted at the next look,
// with the time at which it happened where that is known.
func (p *Peer) refresh(now tick) {
	p.seen = p.facts(now) // kept in the peer, so that nothing is allocated
	s, why := p.seen.state()
	if s == p.state && why == p.why {
		return
	}
	at := now
	if end := tick(p.ejected.Load()); p.state == StateEjected && s == StateReady && end > p.since {
		at = min(now, end)
	}
	p.state, p.since, p.why = s, at, why
}

// Health returns the replica's state at now, since when and why.
func (p *Peer) Health(now time.Time) Health {
	at := p.table.clock.tick(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refresh(at)
	h := Health{State: p.state, Since: p.table.clock.time(p.since), Why: p.why}
	if end := tick(p.ejected.Load()); at < end {
		h.EjectedUntil = p.table.clock.time(end)
	}
	return h
}
