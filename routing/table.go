package routing

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// parkedMax and parkedFor bound the records kept for members that have not joined yet.
	parkedMax = 256
	parkedFor = 5 * time.Second
	// forgetModel is how long a model name that nobody lists any more is still "known": 503 instead of 404.
	forgetModel = 10 * time.Minute
	// lostMax bounds how many such names are kept.
	lostMax = 10_000
	// loneShare is our share of the fleet's arrivals from which on our own books beat the records.
	loneShare = 0.8
	// shareFor is how fast old arrivals fade from that share.
	shareFor = 10 * time.Second
)

// Table is what this agent knows about all replicas. Writers lock; readers load an immutable Snapshot. A record only
// replaces its peer's view, so it costs the same at 2 and at 1,000 peers; the snapshot is rebuilt when members or
// model lists change.
type Table struct {
	clock clock
	self  *Peer
	snap  atomic.Pointer[Snapshot]
	live  atomic.Pointer[func() Live]
	index prefixIndex            // the peers' digests
	own   atomic.Pointer[Digest] // our own

	median  atomic.Uint64 // prefill rate of the fleet, tokens/s (float bits)
	share   atomic.Uint64 // our share of the fleet's arrivals (float bits)
	rampOff atomic.Bool   // more than half of the fleet is in slow start

	ejecting sync.Mutex // one ejection at a time; taken inside a peer's lock

	mu       sync.Mutex
	peers    map[uint64]*Peer
	parked   []parked
	departed map[string]departed  // by address
	lost     map[string]time.Time // names that nobody lists any more → since when
	ours     float64              // our sends, fading
	all      float64              // accepted by anybody, fading
	sharedAt tick
	medianAt tick
}

type parked struct {
	report Report
	at     time.Time
}

// NewTable returns a table that knows only ourselves.
func NewTable(self Member) *Table {
	t := &Table{peers: map[uint64]*Peer{}, lost: map[string]time.Time{}, departed: map[string]departed{}}
	t.index.init()
	self.Self = true
	t.self = newPeer(t, self)
	t.peers[self.Boot] = t.self
	t.index.join(t.self)
	t.rebuild()
	return t
}

// Self returns our own replica.
func (t *Table) Self() *Peer { return t.self }

// Snapshot returns the newest picture. It stays as it is; load it anew for each pick.
func (t *Table) Snapshot() *Snapshot { return t.snap.Load() }

// Peer returns the alive member of that boot id, or nil.
func (t *Table) Peer(boot uint64) *Peer { return t.snap.Load().byBoot[boot] }

// SetLive gives the table a look at our own replica's exact state; each pick calls it once, so it must be quick and
// safe for concurrent use.
func (t *Table) SetLive(live func() Live) { t.live.Store(&live) }

// SetMember adds a member or replaces its identity, and applies a record that came before it.
func (t *Table) SetMember(m Member, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.setMember(m, now)
	t.rebuild()
	t.unpark(p, now)
}

// SetMembers does the same for many at once, for the cost of one.
func (t *Table) SetMembers(all []Member, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range all {
		t.setMember(m, now)
	}
	t.rebuild()
	for _, m := range all {
		t.unpark(t.peers[m.Boot], now)
	}
}

// setMember changes the member list; the lock is held.
func (t *Table) setMember(m Member, now time.Time) *Peer {
	at := t.clock.tick(now)
	m.Self = m.Boot == t.self.boot
	p := t.peers[m.Boot]
	if p == nil {
		p = newPeer(t, m)
		t.peers[m.Boot] = p
		t.index.join(p)
		p.mu.Lock()
		p.refresh(at)
		p.since = at
		p.mu.Unlock()
	} else {
		p.member.Store(&m)
	}
	a, b := t.self.member.Load().Zone, m.Zone
	p.elsewhere.Store(a != b && a != "" && b != "")
	return p
}

// RemoveMember forgets a member that left, failed or was reaped. Ourselves cannot be removed.
func (t *Table) RemoveMember(boot uint64, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers[boot]
	if p == nil || p == t.self {
		return
	}
	p.gone.Store(true)
	p.mu.Lock()
	p.refresh(t.clock.tick(now))
	p.mu.Unlock()
	t.depart(p, now)
	t.index.leave(p)
	t.remember(p, now)
	delete(t.peers, boot)
	t.rebuild()
}

// SetModels replaces a replica's model list and the kinds of paths that it serves.
func (t *Table) SetModels(boot uint64, models []Model, serves Service, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers[boot]
	if p == nil {
		return
	}
	if l := p.models.Load(); l != nil && l.serves == serves && slices.EqualFunc(l.models, models, Model.equal) {
		return // read anew, nothing changed
	}
	t.remember(p, now)
	p.models.Store(&modelList{models: slices.Clone(models), serves: serves, at: now})
	t.rebuild()
}

// remember notes the names that p is about to stop listing. A name that somebody else lists stays found by its group,
// and is noted again when the last one goes.
func (t *Table) remember(p *Peer, now time.Time) {
	l := p.models.Load()
	if l == nil {
		return
	}
	for name, at := range t.lost {
		if now.Sub(at) > forgetModel {
			delete(t.lost, name)
		}
	}
	for _, m := range l.models {
		for _, name := range append([]string{m.ID}, m.Aliases...) {
			if _, known := t.lost[name]; known || len(t.lost) < lostMax {
				t.lost[name] = now
			}
		}
	}
}

// Update takes a record. It returns false for a duplicate, an older one, or one of a boot id that is no member yet;
// the last is kept for 5 s (at most 256 of them) in case the member comes.
func (t *Table) Update(r Report, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers[r.Boot]
	if p == nil {
		t.park(r, now)
		return false
	}
	return t.apply(p, r, now)
}

// apply puts a record into its peer if it is newer than the one there.
func (t *Table) apply(p *Peer, r Report, now time.Time) bool {
	old := p.view.Load()
	if old != nil && !newer(r.Seq, old.report.Seq) {
		return false
	}
	at := t.clock.tick(now)
	v := newView(r, now, at)
	p.mu.Lock()
	n, tokens, ours, all := p.sends.report(v.sampled, r.Accepted)
	p.extraN.Store(n)
	p.extraTok.Store(tokens)
	p.view.Store(v)
	p.heard(v, at)
	p.mu.Unlock()
	t.confirm(p, &r, at)
	if all.OK {
		t.arrivals(ours, all.V, at)
	}
	if t.medianAt == never || at-t.medianAt > tick(time.Second) {
		t.medianAt = at
		t.setMedians(at)
	}
	return true
}

// arrivals adds to the sums behind our share of the fleet's arrivals.
func (t *Table) arrivals(ours, all int64, at tick) {
	if t.sharedAt != never && at > t.sharedAt {
		k := math.Exp(-float64(at-t.sharedAt) / float64(shareFor))
		t.ours *= k
		t.all *= k
	}
	t.sharedAt = at
	t.ours += float64(ours)
	t.all += float64(max(ours, all))
	share := 0.0
	if t.all >= 10 { // fewer say nothing
		share = t.ours / t.all
	}
	t.share.Store(math.Float64bits(share))
}

// Share returns our share of the fleet's arrivals, 0..1, by the counters in the records; 0 = unknown or none.
func (t *Table) Share() float64 { return math.Float64frombits(t.share.Load()) }

// Rate returns the fleet's median prefill rate in tokens/s, or the default before anybody has measured one.
func (t *Table) Rate() float64 {
	if m := math.Float64frombits(t.median.Load()); m > 0 {
		return m
	}
	return defaultRate
}

// setMedians takes the medians of the fleet anew, at most once a second.
func (t *Table) setMedians(at tick) {
	var rates []float64
	for _, p := range t.peers {
		if v := p.view.Load(); v != nil && v.base.rate > 0 {
			rates = append(rates, v.base.rate)
		}
	}
	if len(rates) > 0 {
		slices.Sort(rates)
		t.median.Store(math.Float64bits(rates[len(rates)/2]))
	}
	t.setSlowness(at)
}

// park keeps a record of an unknown boot id; the newest of each, the oldest falls out.
func (t *Table) park(r Report, now time.Time) {
	t.parked = slices.DeleteFunc(t.parked, func(p parked) bool { return now.Sub(p.at) > parkedFor })
	for i := range t.parked {
		if p := &t.parked[i]; p.report.Boot == r.Boot {
			if newer(r.Seq, p.report.Seq) {
				*p = parked{r, now}
			}
			return
		}
	}
	if len(t.parked) == parkedMax {
		t.parked = slices.Delete(t.parked, 0, 1)
	}
	t.parked = append(t.parked, parked{r, now})
}

// unpark applies the record that came before its member, if it is not too old. Its age counts from its receipt.
func (t *Table) unpark(p *Peer, now time.Time) {
	for i, k := range t.parked {
		if k.report.Boot != p.boot {
			continue
		}
		t.parked = slices.Delete(t.parked, i, i+1)
		if now.Sub(k.at) <= parkedFor {
			t.apply(p, k.report, k.at)
		}
		return
	}
}

// rebuild publishes a new snapshot.
func (t *Table) rebuild() {
	s := &Snapshot{table: t, self: t.self, byBoot: make(map[uint64]*Peer, len(t.peers)), models: map[string]*group{}, listsKnown: true}
	for boot, p := range t.peers {
		s.peers = append(s.peers, p)
		s.byBoot[boot] = p
	}
	slices.SortFunc(s.peers, func(a, b *Peer) int { return cmp.Compare(a.boot, b.boot) })
	s.all = &group{self: -1}
	for _, p := range s.peers {
		l := p.models.Load()
		e := entry{peer: p, boot: p.boot}
		if l == nil {
			s.listsKnown = false
			s.all.add(e)
			continue
		}
		e.serves = l.serves
		s.all.add(e)
		for _, m := range l.models {
			e.context = m.ContextLength
			s.group(m.ID).add(e)
			for _, a := range m.Aliases {
				s.group(a).add(e)
			}
		}
	}
	s.lost = make(map[string]time.Time, len(t.lost))
	for name, at := range t.lost {
		if s.models[name] == nil {
			s.lost[name] = at
		}
	}
	t.snap.Store(s)
}
