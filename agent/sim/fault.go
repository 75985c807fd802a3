package sim

import (
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// detectAfter is how long membership takes to find a dead agent.
const detectAfter = 2e9 // ns

// plan puts the faults of the configuration into the queue.
func (s *Sim) plan() {
	outage := func(i int32, o Outage) {
		if o.At <= 0 {
			return
		}
		s.events.push(event{at: int64(o.At), kind: evKill, a: i})
		s.events.push(event{at: int64(o.At) + detectAfter, kind: evDetect, a: i})
		if o.Back > o.At {
			s.events.push(event{at: int64(o.Back), kind: evRevive, a: i})
		}
	}
	outage(int32(min(1, len(s.agents)-1)), s.cfg.Kill)
	for _, a := range s.agents {
		if a.zone == 0 {
			outage(a.i, s.cfg.LoseZone)
		}
	}
	if w := s.cfg.Slow; w.Factor > 0 && w.Factor != 1 {
		s.events.push(event{at: int64(w.At), kind: evSlow, a: 0})
		if w.End > w.At {
			s.events.push(event{at: int64(w.End), kind: evSlow, a: 0, b: 1})
		}
	}
}

// kill ends a replica, engine and agent, in an instant.
func (s *Sim) kill(d *agent, now int64) {
	if !d.alive {
		return
	}
	d.alive = false
	d.busy += d.engine.Counters().Busy
	d.engine.Kill(time.Duration(now))
	for _, ev := range d.engine.Advance(time.Duration(now)) {
		if r := s.live[ev.Job]; r != nil && ev.Kind == enginesim.Lost {
			r.tokenN = ev.Tokens
		}
	}
	s.alarms.set(d.i, never)
	d.held, d.heldTokens = nil, 0
	d.nPublish, d.published = 0, [ring]publication{}
	for _, a := range s.agents {
		a.heard[d.i] = 0
	}
	for _, r := range s.live {
		switch {
		case r == nil:
		case r.entry == d.i:
			s.orphan(r, now)
		case r.target == d.i && (r.stage == stageHeld || r.stage == stageEngine):
			r.stage = stageUnderWay
			s.back(r, routing.OutcomeReset, now)
		}
	}
}

// orphan is a request whose entry died: its client repeats it elsewhere, unless it has read some of the answer.
func (s *Sim) orphan(r *request, now int64) {
	r.gen++ // what is under way goes nowhere
	t := s.agents[r.target]
	switch r.stage {
	case stageHeld:
		if t.alive {
			for k, h := range t.held {
				if h == r {
					s.unhold(t, k)
					break
				}
			}
		}
	case stageEngine:
		if t.alive {
			t.account.done(&r.flight, 0, now)
			t.engine.Abort(time.Duration(now), r.handle)
			s.alarm(t)
			s.pump(t, now)
		}
	}
	s.release(r)
	r.peer = nil
	r.stage, r.entry = stagePick, -1
	if r.firstAt > 0 {
		s.counts.Cut++
		if s.measures(r) {
			s.samples.cut++
		}
		s.fail(r)
		return
	}
	r.attempts, r.fixed, r.ticket = 0, false, false
	s.counts.Repeated++
	s.events.push(event{at: now + repeatAfter, kind: evPick, r: r, gen: r.gen})
}

// detect removes a dead replica from everybody's membership.
func (s *Sim) detect(d *agent, now int64) {
	if d.alive {
		return
	}
	for _, a := range s.agents {
		if a.alive && a.peers[d.i] != nil {
			a.table.RemoveMember(d.boot, s.time(now))
			a.peers[d.i] = nil
		}
	}
}

// revive starts a dead replica anew, with an empty cache.
func (s *Sim) revive(d *agent, now int64) {
	if d.alive {
		return
	}
	s.detect(d, now)
	d.life++
	d.ready = now
	s.begin(d, now)
	for _, a := range s.agents {
		if a.alive && a != d {
			s.meet(a, d, now)
		}
	}
	s.loops(d, now)
}
