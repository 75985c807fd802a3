package sim

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// Sim is one run.
type Sim struct {
	cfg    Config
	spec   spec
	now    int64 // ns since the start
	events queue
	alarms alarms
	agents []*agent
	source *source
	rnd    *rand.Rand
	next   *request // the one that arrives next

	live      []*request // by slot; nil = none
	pool      []*request
	questions []*question
	ended     int

	counts  Counts
	samples samples
}

// epoch is the moment at which virtual time begins, for code that wants a time.Time.
var epoch = time.Unix(1_000_000_000, 0)

func (s *Sim) time(now int64) time.Time { return epoch.Add(time.Duration(now)) }

// Run simulates. It returns the context's error if that ends first.
func Run(ctx context.Context, cfg Config) (Result, error) {
	s, err := newSim(cfg)
	if err == nil {
		err = s.loop(ctx)
	}
	if err != nil {
		return Result{}, err
	}
	return s.result(), nil
}

func newSim(cfg Config) (*Sim, error) {
	cfg, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	s := &Sim{cfg: cfg, rnd: rand.New(rand.NewPCG(cfg.Seed, 0x656e747279)), alarms: newAlarms(cfg.Replicas)}
	if s.spec, err = cfg.spec(); err != nil {
		return nil, err
	}
	s.source = newSource(cfg.Trace, cfg.Arrivals, cfg.Rate, cfg.Requests, cfg.Seed)
	for i := range int32(cfg.Replicas) {
		a := &agent{i: i, zone: i % int32(cfg.Zones), alive: true, rnd: rand.New(rand.NewPCG(cfg.Seed, 1000+uint64(i))),
			heard: make([]int, cfg.Replicas)}
		a.boot = bootOf(i, 0)
		a.digest = routing.NewDigest(cfg.Engine.KVTokens)
		s.agents = append(s.agents, a)
	}
	for _, a := range s.agents {
		s.begin(a, 0)
	}
	for _, a := range s.agents {
		s.loops(a, 0)
	}
	s.plan()
	s.arriveNext()
	return s, nil
}

// loops starts what an agent does by the clock.
func (s *Sim) loops(a *agent, now int64) {
	life := int32(a.life)
	s.events.push(event{at: now + int64(s.rnd.Float64()*2*float64(s.cfg.GossipAge)), kind: evReport, a: a.i, b: life})
	s.events.push(event{at: now + int64(s.rnd.Float64()*scrapeEvery), kind: evScrape, a: a.i, b: life})
	if s.spec.digest && s.cfg.Trace.Prefixes {
		s.events.push(event{at: now + int64(s.rnd.Float64()*float64(s.cfg.DigestEvery)), kind: evDelta, a: a.i, b: life})
	}
}

// patience is how long after the last arrival a run waits for the last answers.
const patience = 600e9 // ns

// loop runs until every request has ended.
func (s *Sim) loop(ctx context.Context) error {
	limit := int64(s.cfg.Duration) + patience
	told := 0
	for n := 0; s.ended < s.cfg.Requests; n++ {
		if n&0xffff == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			if f := s.cfg.Progress; f != nil && s.ended > told {
				told = s.ended
				f(s.ended, s.cfg.Requests)
			}
		}
		i, at := s.alarms.first()
		if len(s.events.heap) > 0 && s.events.heap[0].at <= at {
			e := s.events.pop()
			if e.at > limit {
				break
			}
			s.now = e.at
			if e.r == nil || e.r.gen == e.gen {
				s.happen(&e)
			}
			continue
		}
		if at > limit {
			break
		}
		s.now = at
		s.step(s.agents[i], at)
	}
	if f := s.cfg.Progress; f != nil {
		f(s.ended, s.cfg.Requests)
	}
	return nil
}

// happen deals with one event.
func (s *Sim) happen(e *event) {
	now := e.at
	var a *agent
	if e.r == nil {
		a = s.agents[e.a]
	}
	switch e.kind {
	case evArrive:
		r := s.next
		s.arriveNext()
		s.pick(r, now)
	case evPick:
		s.pick(e.r, now)
	case evQuestion:
		s.answer(e.r, e.a == 1, now)
	case evSettle:
		s.settle(e.r, now)
	case evDeliver:
		s.deliver(e.r, now)
	case evFirst:
		s.first(e.r, now)
	case evDone:
		s.done(e.r, now)
	case evBack:
		s.broken(e.r, routing.Outcome(e.a), now)
	case evBusier:
		s.busier(e.r, now)
	case evMoved:
		s.moved(e.r, now)
	case evReport:
		if s.again(e, a, 2*int64(s.cfg.GossipAge)) {
			s.publish(a, now, false)
		}
	case evScrape:
		if s.again(e, a, scrapeEvery) {
			s.scrape(a, now)
		}
	case evDelta:
		if s.again(e, a, int64(s.cfg.DigestEvery)) {
			s.share(a, now)
		}
	case evNotice:
		for _, b := range s.agents {
			if b != a && b.alive {
				b.pause = 0
				s.wake(b, now)
			}
		}
	case evTurn:
		a.turning = false
		if a.alive && len(a.held) > 0 {
			s.pump(a, now)
		}
	case evWake:
		if a.alive {
			s.wake(a, now)
		}
	case evPull:
		s.pull(a, s.agents[e.b], now)
	case evPullReply:
		if a.alive {
			s.pulled(a, int(e.b), now)
		}
	case evKill:
		s.kill(a, now)
	case evDetect:
		s.detect(a, now)
	case evRevive:
		s.revive(a, now)
	case evSlow:
		x := s.cfg.speed(int(a.i))
		if e.b == 0 {
			x /= s.cfg.Slow.Factor
		}
		if a.alive {
			a.engine.SetSpeed(time.Duration(now), x)
			s.alarm(a)
		}
	}
}

// again repeats what an agent does by the clock, for as long as that life of it lasts.
func (s *Sim) again(e *event, a *agent, every int64) bool {
	if !a.alive || int32(a.life) != e.b {
		return false
	}
	s.events.push(event{at: e.at + every, kind: e.kind, a: e.a, b: e.b})
	return true
}

// alarm notes when an agent's engine has something to tell.
func (s *Sim) alarm(a *agent) {
	at := never
	if t, ok := a.engine.NextEvent(); ok && a.alive {
		at = int64(t)
	}
	s.alarms.set(a.i, at)
}

// scrape reads the engine's page.
func (s *Sim) scrape(a *agent, now int64) {
	s.step(a, now)
	a.kv = float64(a.engine.Load().KVUsed) / float64(s.cfg.Engine.KVTokens)
	a.entered = 0
	s.pump(a, now)
}

// step lets an engine run to now and deals with what happened there.
func (s *Sim) step(t *agent, now int64) {
	events := t.engine.Advance(time.Duration(now))
	ended := false
	for i := range events { // nothing below calls the engine before the last one
		ev := &events[i]
		r := s.live[ev.Job]
		switch ev.Kind {
		case enginesim.Started:
			if r.firstAt == 0 && ev.Tokens == 0 {
				r.hit = ev.Cached
			}
			if len(r.blocks) > 0 && ev.Tokens == 0 {
				t.digest.Correct(r.in-r.local, ev.Cached)
			}
		case enginesim.First:
			t.account.first(&r.flight, now)
			r.tokenN = 1
			ended = true
			s.events.push(event{at: now + int64(s.hop(t.i, r.entry)), kind: evFirst, r: r, gen: r.gen})
		case enginesim.Done:
			t.account.done(&r.flight, ev.Tokens, now)
			r.tokenN = ev.Tokens
			r.stage = stageAnswered
			ended = true
			s.events.push(event{at: now + int64(s.hop(t.i, r.entry)), kind: evDone, r: r, gen: r.gen})
		}
	}
	if ended {
		s.pump(t, now)
	}
	s.alarm(t)
}

// arriveNext draws the next request.
func (s *Sim) arriveNext() {
	if s.next = s.take(); !s.source.next(s.next) {
		s.live[s.next.slot] = nil
		s.next = nil
		return
	}
	s.next.entry = -1
	s.events.push(event{at: s.next.arrival, kind: evArrive, r: s.next, gen: s.next.gen})
}
