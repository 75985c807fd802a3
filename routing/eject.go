package routing

import (
	"math"
	"slices"
	"time"
)

// The values of passive ejection. Limits count in small numbers, since one agent sees a few requests a second.
const (
	hardInRow    = 3                      // hard failures in a row
	windowSize   = 20                     // outcomes looked at …
	windowFor    = tick(30 * time.Second) // … no older than this
	windowMin    = 5                      // … and no fewer than this
	windowShare  = 0.5                    // share of failures among them
	ejectFirst   = 5 * time.Second        // first ejection; each further one doubles it
	ejectMost    = 60 * time.Second
	ejectJitter  = 0.2
	forgiveAfter = tick(60 * time.Second) // good service that takes one doubling back
	ejectShare   = 0.3                    // of a model's replicas ejected at a time, but always one

	refusedFor  = tick(5 * time.Second) // a refused connection counts as dead, until the next record
	busyFor     = time.Second           // hold-off of a busy reply without Retry-After
	busyMost    = 60 * time.Second
	failFor     = tick(10 * time.Second) // how long a failure counts as wait
	failSeconds = 5.0                    // … of at least this much
)

// Values of Peer.trial.
const (
	trialNone    = iota
	trialWaiting // the ejection is over, or will be: the next request is the trial
	trialRunning // it is under way; nothing else is sent
)

// health is what we saw of a peer ourselves. The peer's lock guards it.
type health struct {
	state State
	since tick
	why   string
	seen  facts // what they followed from

	streak      int // hard failures in a row
	window      [windowSize]outcomeAt
	windowN     int
	ejections   int // in a row; the doubling
	ejectedSlow bool

	firsts  [32]float64 // newest times to first token, s
	firstsN int
	ramping int // first tokens in time during slow start

	actual float64 // EWMA of the time to first token, s; its ratio to the next is the slowness: a mean of ratios would be that of the shortest prompts
	wanted float64 // EWMA of its prediction, s
	slowN  int
	slowAt tick
}

type outcomeAt struct {
	at   tick
	hard bool
}

// judge takes the end of one request; the lock is held.
func (p *Peer) judge(o Outcome, now tick) {
	trial := p.trial.Load() == trialRunning
	switch {
	case o == OutcomeOK:
		p.streak = 0
		p.window[p.windowN%windowSize] = outcomeAt{now, false}
		p.windowN++
		if trial {
			p.readmit(now)
		}
	case o.Hard():
		p.streak++
		p.window[p.windowN%windowSize] = outcomeAt{now, true}
		p.windowN++
		p.failWait.Store(math.Float64bits(max(failSeconds, p.p95())))
		p.failUntil.Store(int64(now + failFor))
		if o == OutcomeRefused {
			p.deadUntil.Store(int64(now + refusedFor))
		}
		if trial || p.streak >= hardInRow || p.failing(now) {
			p.eject(now, false)
		}
	default:
		if trial { // says nothing about the replica: the next one is the trial
			p.trial.Store(trialWaiting)
		}
		if o == OutcomeBusy {
			p.holdOff(busyFor, now)
		}
	}
	p.refresh(now)
}

// failing reports whether at least half of the newest outcomes are hard failures.
func (p *Peer) failing(now tick) bool {
	n, bad := 0, 0
	for _, w := range p.window[:min(p.windowN, windowSize)] {
		if now-w.at <= windowFor {
			n++
			if w.hard {
				bad++
			}
		}
	}
	return n >= windowMin && float64(bad) >= windowShare*float64(n)
}

// eject puts the replica aside for a time, unless too many of a model's replicas are aside already.
func (p *Peer) eject(now tick, slow bool) {
	last := tick(p.ejected.Load())
	if now < last {
		return
	}
	p.table.ejecting.Lock() // two at once could both be the last one allowed
	defer p.table.ejecting.Unlock()
	if !p.table.mayEject(p, now) {
		p.trial.Store(trialNone)
		return
	}
	p.ejections -= min(p.ejections, int((now-last)/forgiveAfter))
	p.ejections++
	until := now + tick(ejectionTime(p.ejections, mix(p.boot^uint64(now))))
	p.ejected.Store(int64(until))
	p.ejectedSlow = slow
	p.softUntil.Store(max(p.softUntil.Load(), int64(until)))
	p.trial.Store(trialWaiting)
	p.streak, p.windowN = 0, 0
	p.slowN = 0
}

// ejectionTime returns the k-th ejection's time: 5 s × 2^(k−1), at most 60 s, ± 20 % by random.
func ejectionTime(k int, random uint64) time.Duration {
	d := ejectMost
	if k <= 4 {
		d = min(ejectMost, ejectFirst<<(k-1))
	}
	u := float64(random>>11)/(1<<53)*2 - 1
	return time.Duration(float64(d) * (1 + ejectJitter*u))
}

// mayEject reports whether p may be put aside: in every model's group at most max(1, 30 %) are, and never the last
// usable one.
func (t *Table) mayEject(p *Peer, now tick) bool {
	s := t.snap.Load()
	fits := func(g *group) bool {
		aside, usable, in := 0, 0, false
		for i := range g.entries {
			q := g.entries[i].peer
			if q == p {
				in = true
				continue
			}
			switch l := q.level(q.view.Load(), now, 1); {
			case now < tick(q.ejected.Load()):
				aside++
			case l <= levelKept:
				usable++
			}
		}
		return !in || usable > 0 && aside+1 <= max(1, int(ejectShare*float64(len(g.entries))))
	}
	if l := p.models.Load(); l != nil && len(l.models) > 0 {
		for _, m := range l.models {
			if g := s.models[m.ID]; g != nil && !fits(g) {
				return false
			}
		}
		return true
	}
	return fits(s.all)
}

// readmit ends the trial and begins slow start; the lock is held.
func (p *Peer) readmit(now tick) {
	p.trial.Store(trialNone)
	p.rampFrom.Store(int64(now))
	p.ramping = 0
	p.failUntil.Store(int64(never))
}

// HoldOff takes the replica out for as long as its busy reply asked for (Retry-After; 0 = 1 s, at most 60 s). It is
// no failure. Call it besides Done(OutcomeBusy) where the reply names a time.
func (p *Peer) HoldOff(d time.Duration, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.holdOff(d, p.table.clock.tick(now))
}

func (p *Peer) holdOff(d time.Duration, now tick) {
	if d <= 0 {
		d = busyFor
	}
	p.softUntil.Store(max(p.softUntil.Load(), int64(now+tick(min(d, busyMost)))))
}

// heard takes note of a new record; the lock is held.
func (p *Peer) heard(v *view, now tick) {
	p.deadUntil.Store(int64(never))
	p.refresh(now)
}

// penalty returns how many seconds of wait a recent failure counts as.
func (p *Peer) penalty(now tick) float64 {
	if now < tick(p.failUntil.Load()) {
		return math.Float64frombits(p.failWait.Load())
	}
	return 0
}

// p95 returns the 95th percentile of the newest times to first token, in seconds.
func (p *Peer) p95() float64 {
	n := min(p.firstsN, len(p.firsts))
	if n == 0 {
		return 0
	}
	x := p.firsts
	slices.Sort(x[:n])
	return x[(n-1)*95/100]
}
