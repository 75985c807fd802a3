package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

const (
	gateTurn     = 10e6   // ns between two looks at the gate by the clock
	ticketFor    = 2e9    // ns that a pull is good for
	pullPause    = 10e6   // ns after a victim that gave nothing; it doubles …
	pullPauseMax = 80e6   // … up to this, until news come
	scrapeEvery  = 200e6  // ns between two readings of a busy engine's page
	repeatAfter  = 500e6  // ns after which a client repeats what its entry lost
	refusedAfter = 1000e6 // ns after which a client repeats what nobody took
	refusedMost  = 5
)

// arrive takes a request that has reached its target: to the engine, or to the gate.
func (s *Sim) arrive(t *agent, r *request, now int64) {
	r.local = r.uncached(t.digest.Match(r.blocks))
	if r.limit > 0 && r.peer != nil && !r.peer.Self() {
		if a := t.table.Answer(s.ask(r), s.time(now)); !a.OK || a.Score > r.limit {
			r.limit, r.refused = 0, true
			s.counts.Busier++
			s.events.push(event{at: now + int64(s.hop(t.i, r.entry)), kind: evBusier, r: r, gen: r.gen})
			return
		}
	}
	invited := r.ticket
	r.ticket = false
	if invited && len(t.expected) > 0 {
		t.expected = slices.Delete(t.expected, 0, 1)
	}
	if !s.spec.gate || invited || len(t.held) == 0 && s.room(t, r, now) {
		s.enter(t, r, now)
		return
	}
	r.stage, r.since, r.waiting = stageHeld, now, true
	t.held = append(t.held, r)
	t.heldTokens += r.local
	t.digest.Expect(r.blocks)
	s.turnLater(t, now)
	if len(t.held) == 1 && s.spec.steal {
		s.publish(t, now, true)
		s.events.push(event{at: now + int64(s.cfg.Hop), kind: evNotice, a: t.i})
	}
}

// uncached is how many prompt tokens the engine must compute if it has that many of the leading blocks.
func (r *request) uncached(blocks int) int { return max(1, r.in-min(blocks*blockTokens, r.in-1)) }

// gate is what an agent knows of its engine.
func (s *Sim) gate(t *agent) routing.Gate {
	return routing.Gate{AtEngine: t.account.running + t.account.waiting, Prompts: t.account.waiting, Pending: t.account.pending, Entered: t.entered,
		Rate: t.account.speed(), Step: t.account.step, RunLimit: routing.Some(s.cfg.Engine.Slots), KVUsed: routing.Some(t.kv),
		KVCapacity: routing.Some(s.cfg.Engine.KVTokens)}
}

// room reports whether the engine could start the request, nil for any, now.
func (s *Sim) room(t *agent, r *request, now int64) bool {
	g := s.gate(t)
	if r == nil {
		return g.Room(0, 0)
	}
	waited := time.Duration(0)
	g.Behind = len(t.held)
	if r.stage == stageHeld { // it is one of them
		waited = time.Duration(now - r.since)
		g.Behind--
	}
	return g.Room(r.local, waited)
}

// enter gives the request to the engine.
func (s *Sim) enter(t *agent, r *request, now int64) {
	r.stage = stageEngine
	r.tokenN = 0
	r.flight = t.account.start(r.local, now)
	t.entered += r.local
	if len(r.blocks) > 0 {
		t.digest.Touch(r.blocks, nil)
	}
	h, err := t.engine.Submit(time.Duration(now), enginesim.Job{ID: uint64(r.slot), Prompt: r.in, Output: r.out, Blocks: r.blocks})
	s.alarm(t)
	if err != nil {
		t.account.done(&r.flight, 0, now)
		r.stage = stageAnswered
		o := routing.OutcomeBusy
		if errors.Is(err, enginesim.ErrTooLong) {
			o = routing.OutcomeClientError
		}
		s.back(r, o, now)
		return
	}
	r.handle = h
}

// pump lets through whom the engine can start now, and wakes the thief if it could take more.
func (s *Sim) pump(t *agent, now int64) {
	if !s.spec.gate {
		return
	}
	for len(t.held) > 0 {
		if !s.room(t, t.held[0], now) {
			s.turnLater(t, now)
			return
		}
		s.enter(t, s.unhold(t, 0), now)
	}
	s.wake(t, now)
}

// unhold takes the k-th held request out.
func (s *Sim) unhold(t *agent, k int) *request {
	r := t.held[k]
	t.held = slices.Delete(t.held, k, k+1)
	t.heldTokens -= r.local
	t.digest.Forgo(r.blocks)
	return r
}

// turnLater lets the gate look again soon.
func (s *Sim) turnLater(t *agent, now int64) {
	if !t.turning {
		t.turning = true
		s.events.push(event{at: now + gateTurn, kind: evTurn, a: t.i})
	}
}

// idle reports whether the engine could start one more request and nothing is held or on its way.
func (s *Sim) idle(t *agent, now int64) bool {
	if !s.spec.gate || !s.spec.steal || !t.alive || len(t.held) > 0 {
		return false
	}
	t.expected = slices.DeleteFunc(t.expected, func(e expectation) bool { return e.until < now })
	return len(t.expected) == 0 && s.room(t, nil, now)
}

// wake lets an idle agent look whether somebody holds requests.
func (s *Sim) wake(t *agent, now int64) {
	if t.pulling || s.holding() == 0 || !s.idle(t, now) {
		return
	}
	s.listen(t, now)
	victim := t.table.Snapshot().Victim(s.time(now), t.rnd)
	if victim == nil {
		return
	}
	t.pulling = true
	s.counts.Pulls++
	v := replicaOf(victim.Boot())
	s.events.push(event{at: now + int64(s.hop(t.i, v)), kind: evPull, a: v, b: t.i})
}

// holding is how many agents hold requests. That nobody does saves the look at all records.
func (s *Sim) holding() (n int) {
	for _, a := range s.agents {
		if len(a.held) > 0 {
			n++
		}
	}
	return n
}

// pull answers a thief: the first held request that is worth moving goes.
func (s *Sim) pull(v, thief *agent, now int64) {
	back := event{at: now + int64(s.hop(v.i, thief.i)), kind: evPullReply, a: thief.i}
	if !v.alive {
		s.events.push(back)
		return
	}
	x := routing.Thief{Pending: thief.account.pending, Running: thief.account.running, Rate: thief.account.speed(),
		RoundTrip: 2 * s.hop(v.i, thief.i)}
	g := s.gate(v)
	h := routing.Held{Before: v.account.pending, Rate: g.Rate, FullKV: g.FullKV(0)}
	p := v.peers[thief.i]
	for k := 0; k < len(v.held) && k < routing.StealLook && p != nil; k++ {
		r := v.held[k]
		h.Here = r.local
		if !r.fixed {
			h.There = v.table.Uncached(p, s.ask(r), s.time(now))
			if x.WorthMoving(h) {
				s.unhold(v, k)
				r.stage, r.fixed, r.thief = stageUnderWay, true, thief.i
				s.counts.Stolen++
				back.b = int32(max(1, h.There))
				s.events.push(event{at: now + int64(s.hop(v.i, r.entry)), kind: evMoved, r: r, gen: r.gen})
				break
			}
		}
		h.Before += r.local
	}
	rep := s.report(v, now)
	s.tell(thief, v, rep, now)
	s.events.push(back)
}

// pulled takes a victim's answer.
func (s *Sim) pulled(t *agent, tokens int, now int64) {
	t.pulling = false
	if tokens > 0 {
		t.pause = 0
		t.expected = append(t.expected, expectation{tokens, now + ticketFor})
		return
	}
	t.pause = min(max(2*t.pause, pullPause), pullPauseMax)
	s.events.push(event{at: now + t.pause, kind: evWake, a: t.i})
}

// busier picks again for a request whose target would not take it at the price that it had said.
func (s *Sim) busier(r *request, now int64) {
	r.peer.Done(routing.OutcomeCancelled, r.tokens, s.time(now))
	r.peer = nil
	s.tellEntry(r, now)
	s.pick(r, now)
}

// moved sends a request whose target gave it away on to the thief.
func (s *Sim) moved(r *request, now int64) {
	a := s.agents[r.entry]
	r.peer.Done(routing.OutcomeCancelled, r.tokens, s.time(now))
	r.peer = nil
	p := a.peers[r.thief]
	if p == nil || !s.agents[r.thief].alive {
		s.pick(r, now)
		return
	}
	r.ticket = true
	tokens := a.table.Uncached(p, s.ask(r), s.time(now))
	s.send(r, routing.Decision{Peer: p, Tokens: tokens, Score: float64(tokens) / max(1, a.account.speed())}, now)
}
