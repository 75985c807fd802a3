package routing

import (
	"math"
	"slices"
	"time"
)

// The values of slow start and of slowness.
const (
	rampFor   = tick(30 * time.Second) // slow start
	rampLeast = 0.1
	rampGood  = 5   // first tokens in time that end it early
	rampTime  = 1.5 // … within this many times their prediction

	slowFrom  = 1.5 // times slower than the median of peers, from which on the score says so
	slowEject = 5.0 // … and from which on it is put aside
	slowMin   = 10  // first tokens seen before that
	slowFor   = tick(30 * time.Second)
	// An old first token weighs 37 % at most after slowMemory others, or after slowFade: who is taken for slow gets few requests,
	// and one at a time must tell that it is as fast as the others. (16 replicas, simulated, prompts of 8,000 tokens, mostly
	// cached: 144.5 ms with 10 and 10 s, which take one in 20 for slow that is not; 140.3 so, 139.9 if nobody ever is.)
	slowMemory = 32
	slowFade   = tick(30 * time.Second)
)

// ramp returns the slow-start share, 0.1 … 1.
func (p *Peer) ramp(v *view, s *Snapshot, now tick) float64 {
	since := tick(p.rampFrom.Load())
	if v != nil {
		since = max(since, v.readyAt)
	}
	if since == never || now-since >= rampFor || since <= tick(p.rampEnded.Load()) || s.table.rampOff.Load() {
		return 1
	}
	return SlowStart(time.Duration(now - since))
}

// SlowStart returns the share of its load that a replica takes that long after it became ready: t/30 s, at least 0.1,
// at most 1. Choosers divide the score by it, the replica itself multiplies its limit of concurrent requests by it.
func SlowStart(since time.Duration) float64 {
	return min(1, max(rampLeast, float64(since)/float64(rampFor)))
}

// SlowStartShare returns the share of its load that our own replica takes at now, 0.1 … 1: by the time since it became
// ready, and 1 once its first answers came in time or while more than half of the fleet starts.
func (t *Table) SlowStartShare(now time.Time) float64 {
	return t.self.ramp(t.self.view.Load(), t.snap.Load(), t.clock.tick(now))
}

// slowFactor returns how many times slower than predicted the replica is, against the median of peers; 1 = as they.
func (p *Peer) slowFactor() float64 {
	if f := p.slowness.Load(); f != 0 {
		return math.Float64frombits(f)
	}
	return 1
}

// Observe takes a request's time to first token with what was predicted for it (Decision.First at the send). It feeds
// the slowness, the early end of slow start, what a failure counts as, and the ewma policy.
func (p *Peer) Observe(predicted, actual time.Duration, now time.Time) {
	at := p.table.clock.tick(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.firsts[p.firstsN%len(p.firsts)] = actual.Seconds()
	p.firstsN++
	p.late(actual.Seconds(), at)
	took, wanted := actual.Seconds(), max(predicted.Seconds(), 0.001)
	if took <= rampTime*wanted {
		if p.ramping++; p.ramping >= rampGood && tick(p.rampEnded.Load()) < at-rampFor {
			p.rampEnded.Store(int64(at))
		}
	}
	if at-p.slowAt > slowFor {
		p.slowN = 0
	}
	p.slowN++
	k := max(1.0/slowMemory, 1/float64(p.slowN), 1-math.Exp(-float64(at-p.slowAt)/float64(slowFade)))
	p.slowAt = at
	p.actual += k * (min(took, 100*wanted) - p.actual)
	p.wanted += k * (wanted - p.wanted)
}

// setSlowness compares each replica's slowness with the median; at most once a second, with the table's lock held.
func (t *Table) setSlowness(now tick) {
	var ratios []float64
	ramping, known := 0, 0
	for _, p := range t.peers {
		p.mu.Lock()
		if p.slowN >= slowMin && now-p.slowAt <= slowFor {
			ratios = append(ratios, p.actual/p.wanted)
		}
		p.mu.Unlock()
		v := p.view.Load()
		if v == nil || v.level >= levelDead {
			continue
		}
		known++
		if since := max(v.readyAt, tick(p.rampFrom.Load())); since != never && now-since < rampFor {
			ramping++
		}
	}
	t.rampOff.Store(ramping*2 > known)
	median := 0.0
	if len(ratios) >= 3 {
		slices.Sort(ratios)
		median = max(0.01, ratios[len(ratios)/2])
	}
	for _, p := range t.snap.Load().peers { // in order, since each ejection counts for the next
		p.mu.Lock()
		f := 0.0
		if median > 0 && p.slowN >= slowMin && now-p.slowAt <= slowFor {
			f = p.actual / p.wanted / median
		}
		switch {
		case f >= slowEject:
			p.eject(now, true)
			p.refresh(now)
			fallthrough
		case f >= slowFrom:
			p.slowness.Store(math.Float64bits(min(f, 2*slowEject)))
		default:
			p.slowness.Store(0)
		}
		p.mu.Unlock()
	}
}
