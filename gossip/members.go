package gossip

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/serf/serf"

	"github.com/grapevine-lb/grapevine/routing"
)

// book is what Serf's member events say: who is alive, where records go, and what still has to be told to OnMember.
// Serf delivers events while it holds its locks, so the book only notes them; one goroutine tells.
type book struct {
	self    string // our node name
	boot    uint64
	cluster string
	profile *Profile
	target  func(identity, net.IP) error // why a member's peer address must not be dialled; nil = all may

	mu      sync.Mutex
	entries map[string]*entry // by node name
	pending []string          // names with news, oldest first
	wake    chan struct{}     // one token: there is news

	refused map[uint64]string // boot ids that are no candidates, beside those whose peer address says so; why

	left    map[uint64]bool // boot ids that left on purpose, remembered longer than their members
	leftAge []uint64        // the same, oldest first

	targets  atomic.Pointer[[]target]                // alive replicas but ourselves, by name
	direct   atomic.Pointer[[]target]                // those of them that get our records directly
	ips      atomic.Pointer[map[netip.Addr]struct{}] // of all alive members
	alive    atomic.Int64                            // the same, counted with ourselves
	foreign  atomic.Int64                            // alive members that are no replicas of this cluster
	replaced atomic.Int64                            // how often replace found something; 0 spares revive its search
}

// entry is one member.
type entry struct {
	id    identity
	addr  string // gossip address
	ip    netip.Addr
	alive bool
	event MemberEvent // newest news
	news  bool
	stock bool   // not a replica: no boot id, of another cluster, or at an address that must not be dialled
	bad   string // why not the latter
	since time.Time
}

// target is where a record goes.
type target struct {
	boot uint64
	addr memberlist.Address
}

func newBook(self string, boot uint64, cluster string, p *Profile) *book {
	b := &book{self: self, boot: boot, cluster: cluster, profile: p, entries: make(map[string]*entry), left: make(map[uint64]bool), refused: make(map[uint64]string), wake: make(chan struct{}, 1)}
	b.targets.Store(new([]target))
	b.direct.Store(new([]target))
	b.ips.Store(&map[netip.Addr]struct{}{})
	b.alive.Store(1)
	return b
}

// note takes one Serf event. It never blocks.
func (b *book) note(e serf.MemberEvent, now time.Time) {
	b.mu.Lock()
	for _, m := range e.Members {
		if m.Name != b.self {
			b.noteOne(e.Type, m, now)
		}
	}
	b.rebuild()
	some := len(b.pending) > 0
	b.mu.Unlock()
	if some {
		select {
		case b.wake <- struct{}{}:
		default:
		}
	}
}

func (b *book) noteOne(t serf.EventType, m serf.Member, now time.Time) {
	e := b.entries[m.Name]
	switch t {
	case serf.EventMemberJoin, serf.EventMemberUpdate:
		id, err := parseTags(m.Name, m.Addr, m.Tags)
		if err == nil && b.left[id.Boot] {
			return // old news, sent again by somebody: no start of an agent has a boot id twice
		}
		if e == nil {
			e = &entry{}
			b.entries[m.Name] = e
		}
		e.stock = err != nil || id.cluster != b.cluster
		e.bad = ""
		if !e.stock && b.target != nil {
			if err := b.target(id, m.Addr); err != nil {
				e.stock, e.bad = true, err.Error()
			}
		}
		if why := b.refused[id.Boot]; why != "" && !e.stock {
			e.stock, e.bad = true, why
		}
		joined := !e.alive || id.Boot != e.id.Boot
		e.id, e.addr, e.alive = id, net.JoinHostPort(m.Addr.String(), strconv.Itoa(int(m.Port))), true
		e.ip, _ = netip.AddrFromSlice(m.Addr)
		e.ip = e.ip.Unmap()
		if joined {
			e.since = now
		}
		if joined || (e.news && e.event == MemberJoined) {
			b.tell(m.Name, e, MemberJoined)
		} else {
			b.tell(m.Name, e, MemberUpdated)
		}
	case serf.EventMemberLeave, serf.EventMemberFailed:
		if e == nil || b.left[e.id.Boot] {
			return
		}
		e.alive = false
		if t == serf.EventMemberLeave {
			b.tell(m.Name, e, MemberLeft)
			b.remember(e.id.Boot)
		} else {
			b.tell(m.Name, e, MemberFailed)
		}
	case serf.EventMemberReap:
		if e != nil {
			e.alive = false
			b.tell(m.Name, e, MemberGone)
			delete(b.refused, e.id.Boot)
		}
	}
}

// maxLeft bounds the memory of those who left.
const maxLeft = 4096

func (b *book) remember(boot uint64) {
	if boot == 0 || b.left[boot] {
		return
	}
	if len(b.leftAge) >= maxLeft {
		delete(b.left, b.leftAge[0])
		b.leftAge = b.leftAge[1:]
	}
	b.left[boot] = true
	b.leftAge = append(b.leftAge, boot)
}

// tell queues news about a member; what it waits to be told already is replaced.
func (b *book) tell(name string, e *entry, ev MemberEvent) {
	e.event = ev
	if !e.news {
		e.news = true
		b.pending = append(b.pending, name)
	}
}

// rebuild makes the list of targets anew. Caller holds mu.
func (b *book) rebuild() {
	var ts []target
	foreign := 0
	ips := make(map[netip.Addr]struct{}, len(b.entries))
	for name, e := range b.entries {
		if e.alive && e.ip.IsValid() {
			ips[e.ip] = struct{}{}
		}
		switch {
		case !e.alive:
		case e.stock:
			foreign++
		default:
			ts = append(ts, target{boot: e.id.Boot, addr: memberlist.Address{Addr: e.addr, Name: name}})
		}
	}
	slices.SortFunc(ts, func(x, y target) int { return cmp.Compare(x.addr.Name, y.addr.Name) })
	direct := ts
	if len(ts) > b.profile.DirectMax {
		direct = predecessors(b.boot, ts, b.profile.WatchSet)
	}
	b.targets.Store(&ts)
	b.ips.Store(&ips)
	b.direct.Store(&direct)
	b.alive.Store(int64(len(ts) + 1))
	b.foreign.Store(int64(foreign))
}

// news is one thing to tell.
type news struct {
	entry
	name string
}

// next takes the oldest news.
func (b *book) next() (news, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.pending) == 0 {
		return news{}, false
	}
	name := b.pending[0]
	b.pending = b.pending[1:]
	e := b.entries[name]
	e.news = false
	if e.event == MemberGone {
		delete(b.entries, name)
	}
	return news{entry: *e, name: name}, true
}

// namesakes returns the alive members with the same pod name and another boot id: former lives, or an operator's mistake.
func (b *book) namesakes(id identity) []news {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []news
	for name, e := range b.entries {
		if e.alive && !e.stock && e.id.pod == id.pod && id.pod != "" && e.id.Boot != id.Boot {
			out = append(out, news{entry: *e, name: name})
		}
	}
	return out
}

// replace marks a member as dead before Serf knows, unless it is gone already. If it is alive after all, its next
// record brings it back (see revive).
func (b *book) replace(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.entries[name]
	if e == nil || !e.alive {
		return false
	}
	e.alive = false
	b.tell(name, e, MemberReplaced)
	b.replaced.Add(1)
	b.rebuild()
	b.kick()
	return true
}

// revive undoes replace when a record of the member arrives.
func (b *book) revive(boot uint64) {
	if b.replaced.Load() == 0 {
		return // the usual case, in the packet goroutine
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, e := range b.entries {
		if e.id.Boot == boot && e.event == MemberReplaced && !e.alive {
			e.alive = true
			b.tell(name, e, MemberJoined)
			b.rebuild()
			b.kick()
		}
	}
}

func (b *book) kick() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// isAlive reports whether a member listens on that gossip address.
func (b *book) isAlive(addr string) bool {
	for _, t := range *b.targets.Load() {
		if t.addr.Addr == addr {
			return true
		}
	}
	return false
}

// MemberInfo is a member as the status shows it.
type MemberInfo struct {
	routing.Member
	GossipAddr string
	Alive      bool
	Event      MemberEvent // newest news
	Since      time.Time   // of the join
	Keys       string      // ids of the keys it can read, newest first
}

// list returns all known replicas but ourselves, by name.
func (b *book) list() []MemberInfo {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]MemberInfo, 0, len(b.entries))
	for _, e := range b.entries {
		if !e.stock {
			out = append(out, MemberInfo{Member: e.id.Member, GossipAddr: e.addr, Alive: e.alive, Event: e.event, Since: e.since, Keys: e.id.keys})
		}
	}
	slices.SortFunc(out, func(x, y MemberInfo) int { return cmp.Compare(x.Node, y.Node) })
	return out
}
