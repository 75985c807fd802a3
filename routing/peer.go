package routing

import (
	"sync"
	"sync/atomic"
	"time"
)

// Peer is one replica, ourselves included. The pointer stays the same from SetMember to RemoveMember of its boot id.
// All methods are safe for concurrent use; those called per request allocate nothing.
type Peer struct {
	// What a pick reads, together so that it stays within few cache lines.
	view      atomic.Pointer[view]
	boot      uint64
	self      bool
	slot      uint16        // index in the prefix index
	elsewhere atomic.Bool   // in another zone
	rtt       atomic.Int64  // measured round trip, ns; 0 = unknown
	pendTok   atomic.Int64  // prompt tokens sent from here without a first token
	pendN     atomic.Int64  // the requests that they belong to
	inflight  atomic.Int64  // sent from here and not done
	extraTok  atomic.Int64  // sent from here since the newest record
	extraN    atomic.Int64  // the requests that they belong to
	softUntil atomic.Int64  // tick until which it is ejected or held off
	ejected   atomic.Int64  // tick until which it is ejected; softUntil is at least that
	deadUntil atomic.Int64  // tick until which a refused connection counts as dead
	failUntil atomic.Int64  // tick until which a failure counts as wait
	failWait  atomic.Uint64 // that wait, s (float bits)
	slowness  atomic.Uint64 // factor ≥ 1 (float bits); 0 = none
	rampFrom  atomic.Int64  // tick of readmission; never = none
	rampEnded atomic.Int64  // tick at which slow start ended early; never = it did not
	trial     atomic.Uint32
	digestAt  atomic.Int64 // tick of the newest prefix digest; never = none

	table  *Table
	member atomic.Pointer[Member]
	models atomic.Pointer[modelList]
	gone   atomic.Bool
	latest atomic.Uint64 // EWMA of time to first token, s (float bits), for the ewma policy
	lateAt atomic.Int64  // tick of its last sample

	digestSeq uint32 // the index's lock guards it

	mu    sync.Mutex
	sends sends
	health
}

// modelList is what SetModels was told. It is replaced, never changed.
type modelList struct {
	models []Model
	serves Service
	at     time.Time
}

func newPeer(t *Table, m Member) *Peer {
	p := &Peer{boot: m.Boot, self: m.Self, table: t}
	p.member.Store(&m)
	return p
}

// Boot returns the boot id.
func (p *Peer) Boot() uint64 { return p.boot }

// Member returns the newest identity.
func (p *Peer) Member() Member { return *p.member.Load() }

// Self reports whether this is our own replica.
func (p *Peer) Self() bool { return p.self }

// Report returns the newest record and when it came; the time is zero before the first.
func (p *Peer) Report() (Report, time.Time) {
	v := p.view.Load()
	if v == nil {
		return Report{}, time.Time{}
	}
	return v.report, v.received
}

// Heard returns when the newest record came; zero before the first.
func (p *Peer) Heard() time.Time {
	if v := p.view.Load(); v != nil {
		return v.received
	}
	return time.Time{}
}

// Age returns how old the newest record's numbers are at now, by our own clock and the age that the record came with;
// unknown before the first record.
func (p *Peer) Age(now time.Time) Opt[time.Duration] {
	v := p.view.Load()
	if v == nil {
		return Opt[time.Duration]{}
	}
	return Some(time.Duration(p.table.clock.tick(now) - v.sampled))
}

// Fresh reports whether the newest record is within its promised heartbeat. Between one and three heartbeats it is
// neither fresh nor stale and used as it is.
func (p *Peer) Fresh(now time.Time) bool {
	v := p.view.Load()
	return v != nil && (p.table.clock.tick(now)-v.sampled)*staleAfter <= v.stale-v.sampled
}

// Stale reports whether no record came for three heartbeats. Our own replica is never stale.
func (p *Peer) Stale(now time.Time) bool {
	v := p.view.Load()
	return !p.self && (v == nil || p.table.clock.tick(now) > v.stale)
}

// Gone reports whether the member was removed or said goodbye.
func (p *Peer) Gone() bool {
	v := p.view.Load()
	return p.gone.Load() || v != nil && v.report.Goodbye
}

// Models returns its model list and path kinds; ok is false before the first SetModels.
func (p *Peer) Models() (models []Model, serves Service, ok bool) {
	l := p.models.Load()
	if l == nil {
		return nil, 0, false
	}
	return l.models, l.serves, true
}

// SetRTT sets the measured round trip on the peer link.
func (p *Peer) SetRTT(d time.Duration) { p.rtt.Store(int64(d)) }

// roundTrip returns what being elsewhere costs, in seconds: the round trip, and more to another zone, so that traffic
// leaves the zone by itself when the wait here grows.
func (p *Peer) roundTrip() float64 {
	if p.self {
		return 0
	}
	d := p.rtt.Load()
	if d <= 0 {
		d = int64(defaultRoundTrip)
	}
	if p.elsewhere.Load() {
		d += int64(otherZone)
	}
	return float64(d) * 1e-9
}

// Inflight returns how many requests sent from here are not done.
func (p *Peer) Inflight() int { return int(p.inflight.Load()) }

// InflightTokens returns the prompt tokens sent from here that have no first token yet.
func (p *Peer) InflightTokens() int { return int(max(0, p.pendTok.Load())) }

// Sent counts one more request under way from here. tokens is how many prompt tokens it is believed to compute there
// (Decision.Tokens). Call it just before sending, and Done exactly once.
func (p *Peer) Sent(tokens int, now time.Time) {
	n := int64(max(1, tokens))
	at := p.table.clock.tick(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inflight.Add(1)
	p.pendTok.Add(n)
	p.pendN.Add(1)
	p.extraTok.Add(n)
	p.extraN.Add(1)
	p.sends.add(at, n)
	if at >= tick(p.ejected.Load()) {
		p.trial.CompareAndSwap(trialWaiting, trialRunning)
	}
}

// FirstToken says that the request's prefill is over; tokens is what Sent was given. Where no such signal comes
// (stream: false), call it after the predicted prefill time. Done may come without it.
func (p *Peer) FirstToken(tokens int, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pendTok.Add(-int64(max(1, tokens)))
	p.pendN.Add(-1)
	if p.trial.Load() == trialRunning {
		p.readmit(p.table.clock.tick(now))
	}
}

// Done ends what Sent began, exactly once. tokens is what Sent was given, or 0 if FirstToken was called.
func (p *Peer) Done(o Outcome, tokens int, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if tokens > 0 {
		p.pendTok.Add(-int64(tokens))
		p.pendN.Add(-1)
	}
	if p.inflight.Add(-1) <= 0 {
		// Nothing is under way, so nothing is pending: a caller's slip cannot add up.
		p.inflight.Store(0)
		p.pendTok.Store(0)
		p.pendN.Store(0)
	}
	p.judge(o, p.table.clock.tick(now))
}

// load returns what the replica is believed to have at now.
func (p *Peer) load(v *view, s *Snapshot) load {
	if p.self {
		if live := s.table.live.Load(); live != nil {
			return p.liveLoad(v, (*live)(), s)
		}
	}
	var l load
	n := max(0, min(p.extraN.Load(), p.inflight.Load()))
	tok := max(0, min(p.extraTok.Load(), p.pendTok.Load()))
	switch {
	case v == nil:
		l.waiting = float64(n)
		l.queue = float64(tok)
	case s.lone() || !v.pending:
		// All arrivals pass here, or nobody else counts: our own books are exact, the record is old.
		l = v.base
		pend := max(0, p.pendN.Load())
		own := max(0, p.pendTok.Load())
		if s.lone() {
			l.queue = float64(own)
			l.waiting = float64(pend)
			l.running = float64(max(0, p.inflight.Load()-pend))
		} else {
			l.queue = max(l.queue+float64(tok), float64(own))
			l.waiting += float64(n)
		}
	default:
		l = v.base
		l.queue += float64(tok)
		l.waiting += float64(n)
	}
	if l.rate <= 0 {
		l.rate = s.table.Rate()
	}
	return l
}

// liveLoad joins our own exact books with the record: the larger count is believed, so that traffic which goes around
// the agent is seen.
func (p *Peer) liveLoad(v *view, live Live, s *Snapshot) load {
	var l load
	if v != nil {
		l = v.base
	}
	l.running = max(l.running, float64(live.Running))
	l.waiting = float64(live.Waiting + live.Held)
	l.queue = float64(live.PendingTokens + live.HeldTokens)
	l.kv = max(l.kv, live.KVUsed)
	if live.PrefillRate > 0 {
		l.rate = live.PrefillRate
	}
	if l.rate <= 0 {
		l.rate = s.table.Rate()
	}
	return l
}
