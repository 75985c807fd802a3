package sim

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// askLimit is how long a request waits for answers.
const askLimit = int64(5 * time.Millisecond)

// ask fills in what the policies, the digests and the answers look at.
func (s *Sim) ask(r *request) *routing.Request {
	r.req = routing.Request{PromptTokens: r.in, Prefix: r.blocks, Tried: r.tried[:min(r.attempts, maxAttempts)]}
	return &r.req
}

// enterAnywhere gives a request to an agent that is alive; clients look up another address if one is dead.
func (s *Sim) enterAnywhere(r *request) bool {
	alive := func(i int32) bool { return s.agents[i].alive }
	for range 64 {
		if i := int32(s.rnd.IntN(s.cfg.Front)); alive(i) {
			r.entry = i
			return true
		}
	}
	for i := range int32(len(s.agents)) {
		if alive(i) {
			r.entry = i
			return true
		}
	}
	return false
}

// pick chooses a replica at the entry, or begins to ask.
func (s *Sim) pick(r *request, now int64) {
	r.stage = stagePick
	if r.entry < 0 && !s.enterAnywhere(r) {
		s.refused(r, now)
		return
	}
	a := s.agents[r.entry]
	if s.spec.exact {
		s.pickExact(a, r, now)
		return
	}
	s.listen(a, now)
	d := a.policy.Pick(a.table.Snapshot(), s.ask(r), s.time(now), a.rnd)
	if d.Peer == nil {
		s.refused(r, now)
		return
	}
	if d.Asks == 0 {
		s.send(r, d, now)
		return
	}
	s.counts.Asked++
	q := s.question()
	q.decision, r.asking = d, q
	var near, far bool
	for i, p := range d.Asked() {
		j := replicaOf(p.Boot())
		switch {
		case j == a.i:
			s.reply(q, i, a, r, now)
		case s.agents[j].zone == a.zone:
			near = true
		default:
			far = true
		}
	}
	wait := int64(0)
	send := func(on bool, hop time.Duration, which int32) {
		if !on {
			return
		}
		wait = max(wait, min(2*int64(hop), askLimit))
		if 2*int64(hop) <= askLimit {
			s.events.push(event{at: now + int64(hop), kind: evQuestion, r: r, gen: r.gen, a: which})
		}
	}
	send(near, s.cfg.Hop, 0)
	send(far, s.cfg.ZoneHop, 1)
	s.events.push(event{at: now + wait, kind: evSettle, r: r, gen: r.gen})
}

func (s *Sim) question() *question {
	if n := len(s.questions); n > 0 {
		q := s.questions[n-1]
		s.questions = s.questions[:n-1]
		q.answers = q.answers[:0]
		return q
	}
	return &question{answers: make([]routing.Answer, 0, routing.MaxAsk)}
}

// reply is what the i-th asked replica, b, says.
func (s *Sim) reply(q *question, i int, b *agent, r *request, now int64) {
	x := b.table.Answer(&r.req, s.time(now))
	x.Index = i
	if b.i != r.entry {
		s.counts.Questions++
		q.records[len(q.answers)] = s.report(b, now)
	}
	q.answers = append(q.answers, x)
}

// answer is the moment at which a question has reached the peers of the entry's own zone, or of the others.
func (s *Sim) answer(r *request, far bool, now int64) {
	a, q := s.agents[r.entry], r.asking
	for i, p := range q.decision.Asked() {
		j := replicaOf(p.Boot())
		if b := s.agents[j]; j != a.i && b.alive && b.boot == p.Boot() && (b.zone != a.zone) == far {
			s.reply(q, i, b, r, now)
		}
	}
}

// settle chooses between the answers.
func (s *Sim) settle(r *request, now int64) {
	a, q := s.agents[r.entry], r.asking
	for k, x := range q.answers {
		if p := q.decision.Ask[x.Index]; !p.Self() {
			a.table.Update(q.records[k], s.time(now))
		}
	}
	d := routing.Settle(&q.decision, q.answers)
	s.release(r)
	if d.Peer == nil {
		s.refused(r, now)
		return
	}
	s.send(r, d, now)
	if !r.refused {
		r.limit = d.Limit()
	}
}

// pickExact takes the replica with the lowest score by the true state of all engines.
func (s *Sim) pickExact(a *agent, r *request, now int64) {
	d := routing.Decision{Reason: routing.ReasonBest}
	ties := 1
	for _, b := range s.agents {
		p := a.peers[b.i]
		if !b.alive || p == nil {
			continue
		}
		s.step(b, now)
		u := max(1, r.in-b.engine.Match(r.blocks))
		ans := b.table.Answer(&routing.Request{PromptTokens: u}, s.time(now))
		if !ans.OK {
			continue
		}
		way := 2 * s.hop(a.i, b.i).Seconds()
		score := ans.Score + way
		switch {
		case d.Peer == nil || score < d.Score:
			ties = 1
		case score == d.Score:
			ties++
			if a.rnd.IntN(ties) > 0 {
				continue
			}
		default:
			continue
		}
		d.Peer, d.Score, d.First, d.Tokens = p, score, ans.First+way, u
	}
	if d.Peer == nil {
		s.refused(r, now)
		return
	}
	s.send(r, d, now)
}

// send sends the request to its target.
func (s *Sim) send(r *request, d routing.Decision, now int64) {
	a := s.agents[r.entry]
	r.peer, r.tokens, r.predicted = d.Peer, max(1, d.Tokens), time.Duration(d.First*1e9)
	r.sentAt, r.begun, r.stage, r.limit = now, false, stageUnderWay, 0
	r.target = replicaOf(d.Peer.Boot())
	d.Peer.Sent(r.tokens, s.time(now))
	if r.target == a.i {
		s.deliver(r, now)
		return
	}
	s.events.push(event{at: now + int64(s.hop(a.i, r.target)), kind: evDeliver, r: r, gen: r.gen})
}

// deliver is the request's arrival at its target.
func (s *Sim) deliver(r *request, now int64) {
	t := s.agents[r.target]
	if !t.alive || t.boot != r.peer.Boot() {
		s.back(r, routing.OutcomeRefused, now)
		return
	}
	s.arrive(t, r, now)
}

// back lets the entry learn that an attempt failed, one hop later.
func (s *Sim) back(r *request, o routing.Outcome, now int64) {
	s.events.push(event{at: now + int64(s.hop(r.target, r.entry)), kind: evBack, r: r, gen: r.gen, a: int32(o)})
}

// first is the first token's arrival at the entry.
func (s *Sim) first(r *request, now int64) {
	r.begun = true
	r.peer.FirstToken(r.tokens, s.time(now))
	r.peer.Observe(r.predicted, time.Duration(now-r.sentAt), s.time(now))
	s.tellEntry(r, now)
	if r.firstAt == 0 {
		r.firstAt = now
	}
}

// tellEntry is the record that comes with the head of an answer.
func (s *Sim) tellEntry(r *request, now int64) {
	if t := s.agents[r.target]; t.alive && r.target != r.entry {
		s.tell(s.agents[r.entry], t, s.report(t, now), now)
	}
}

// close ends the attempt in the entry's books.
func (s *Sim) close(r *request, o routing.Outcome, now int64) {
	tokens := r.tokens
	if r.begun {
		tokens = 0
	}
	r.peer.Done(o, tokens, s.time(now))
	r.peer = nil
}

// done is the end of the answer at the entry.
func (s *Sim) done(r *request, now int64) {
	s.close(r, routing.OutcomeOK, now)
	s.counts.Done++
	if r.target != r.entry {
		s.counts.Forwarded++
	}
	if r.waiting {
		s.counts.Held++
	}
	s.samples.add(s, r, now)
	s.put(r)
}

// broken is the end of an attempt that failed: what has not begun is sent again elsewhere, what has is continued there.
func (s *Sim) broken(r *request, o routing.Outcome, now int64) {
	s.close(r, o, now)
	if o == routing.OutcomeClientError {
		s.counts.TooLong++
		s.fail(r)
		return
	}
	if r.attempts < maxAttempts {
		r.tried[r.attempts] = bootOf(r.target, s.agents[r.target].life)
	}
	r.attempts++
	if r.attempts >= maxAttempts {
		s.fail(r)
		return
	}
	r.fixed, r.ticket = false, false
	if r.firstAt > 0 {
		s.counts.Continued++
		n := min(max(r.tokenN, 1), r.out-1)
		r.in, r.out, r.answered = r.in+n, r.out-n, r.answered+n
	} else {
		s.counts.Retried++
	}
	s.pick(r, now)
}

// refused is a request that nobody takes now: its client comes again.
func (s *Sim) refused(r *request, now int64) {
	s.counts.Refused++
	if r.refusals++; r.refusals > refusedMost {
		s.fail(r)
		return
	}
	r.entry, r.attempts = -1, 0
	s.events.push(event{at: now + refusedAfter, kind: evPick, r: r, gen: r.gen})
}

// fail ends a request without an answer.
func (s *Sim) fail(r *request) {
	s.counts.Failed++
	s.samples.failed(s, r)
	s.put(r)
}
