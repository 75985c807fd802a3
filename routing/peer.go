package routing

import (
	"sync"
	"sync/atomic"
	"time"
)

// Peer is one replica, ourselves included. The pointer stays the same from SetMember to RemoveMember of its boot id.
// All methods are safe for concurrent use; those called per request allocate nothing.
type Peer struct {
	boot   uint64
	member atomic.Pointer[Member]
	view   atomic.Pointer[view]
	models atomic.Pointer[modelList]
	gone   atomic.Bool
	rtt    atomic.Int64 // measured round trip, ns; 0 = unknown

	inflight atomic.Int64 // sent from here and not done
	tokens   atomic.Int64 // prompt tokens of those without a first token

	mu sync.Mutex
}

// view is the newest record of a peer with the time it came. It is replaced, never changed.
type view struct {
	report Report
	at     time.Time // receipt, by our clock
}

// modelList is what SetModels was told. It is replaced, never changed.
type modelList struct {
	models []Model
	serves Service
	at     time.Time
}

// Boot returns the boot id.
func (p *Peer) Boot() uint64 { return p.boot }

// Member returns the newest identity.
func (p *Peer) Member() Member { return *p.member.Load() }

// Self reports whether this is our own replica.
func (p *Peer) Self() bool { return p.member.Load().Self }

// Report returns the newest record and when it came; the time is zero before the first.
func (p *Peer) Report() (Report, time.Time) {
	v := p.view.Load()
	if v == nil {
		return Report{}, time.Time{}
	}
	return v.report, v.at
}

// Models returns its model list and path kinds; ok is false before the first SetModels.
func (p *Peer) Models() (models []Model, serves Service, ok bool) {
	l := p.models.Load()
	if l == nil {
		return nil, 0, false
	}
	return l.models, l.serves, true
}

// Inflight returns how many requests sent from here are not done.
func (p *Peer) Inflight() int { return int(p.inflight.Load()) }

// SetRTT sets the measured round trip on the peer link.
func (p *Peer) SetRTT(d time.Duration) { p.rtt.Store(int64(d)) }

// Sent counts one more request of that many uncached prompt tokens under way from here. Call it just before sending.
func (p *Peer) Sent(tokens int, now time.Time) {
	p.inflight.Add(1)
	p.tokens.Add(int64(tokens))
}

// FirstToken says that the request's prefill is over. tokens is what Sent was given. Done may come without it.
func (p *Peer) FirstToken(tokens int, now time.Time) { p.tokens.Add(-int64(tokens)) }

// Done ends what Sent began, exactly once. tokens is what Sent was given, or 0 if FirstToken took it back already.
func (p *Peer) Done(o Outcome, tokens int, now time.Time) {
	p.inflight.Add(-1)
	p.tokens.Add(-int64(tokens))
}
