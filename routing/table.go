package routing

import (
	"sync"
	"sync/atomic"
	"time"
)

// Table is what this agent knows about all replicas. Writers lock; readers load an immutable Snapshot. A record only
// replaces its peer's view, so it costs the same at 2 and at 1,000 peers; the snapshot is rebuilt when members or
// model lists change.
type Table struct {
	self *Peer
	snap atomic.Pointer[Snapshot]

	mu    sync.Mutex
	peers map[uint64]*Peer
}

// NewTable returns a table that knows only ourselves.
func NewTable(self Member) *Table {
	self.Self = true
	p := &Peer{boot: self.Boot}
	p.member.Store(&self)
	t := &Table{self: p, peers: map[uint64]*Peer{self.Boot: p}}
	t.rebuild()
	return t
}

// Self returns our own replica.
func (t *Table) Self() *Peer { return t.self }

// Snapshot returns the newest picture. It stays as it is; load it anew for each pick.
func (t *Table) Snapshot() *Snapshot { return t.snap.Load() }

// Peer returns the alive member of that boot id, or nil.
func (t *Table) Peer(boot uint64) *Peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.peers[boot]
}

// SetMember adds a member or replaces its identity.
func (t *Table) SetMember(m Member, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m.Self = m.Boot == t.self.boot
	p := t.peers[m.Boot]
	if p == nil {
		p = &Peer{boot: m.Boot}
		t.peers[m.Boot] = p
	}
	p.member.Store(&m)
	t.rebuild()
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
	delete(t.peers, boot)
	t.rebuild()
}

// SetModels replaces a replica's model list and the kinds of paths that it serves.
func (t *Table) SetModels(boot uint64, models []Model, serves Service, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.peers[boot]; p != nil {
		p.models.Store(&modelList{models: models, serves: serves, at: now})
		t.rebuild()
	}
}

// Update takes a record. It returns false for a duplicate, an older one, or one of a boot id that is no member yet;
// the last is kept for 5 s (at most 256 of them) in case the member comes.
func (t *Table) Update(r Report, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers[r.Boot]
	if p == nil {
		return false
	}
	if v := p.view.Load(); v != nil && !newer(r.Seq, v.report.Seq) {
		return false
	}
	p.view.Store(&view{report: r, at: now})
	return true
}

func (t *Table) rebuild() {
	s := &Snapshot{self: t.self}
	for _, p := range t.peers {
		s.peers = append(s.peers, p)
	}
	t.snap.Store(s)
}
