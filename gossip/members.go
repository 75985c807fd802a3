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

	peers   []target                 // alive replicas but ourselves, the nearest before us on the ring first
	changed bool                     // peers differs from targets
	targets atomic.Pointer[[]target] // copy of peers for all who read
	direct  atomic.Pointer[[]target] // those of them that get our records directly
	alive   atomic.Int64             // how many are in targets, counted with ourselves
	foreign atomic.Int64             // alive members that are no replicas of this cluster

	replaced    map[uint64]string // boot ids whose members replace took out, and their names
	anyReplaced atomic.Bool       // spares revive the lock on all other days

	pods map[string]int // how many of peers have a pod name: former lives, or an operator's mistake

	ipMu sync.RWMutex
	ips  map[netip.Addr]int // of all alive members, and how many have each
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
	in    place // where the book's lists have it
}

// place is what the lists of the book hold about an entry.
type place struct {
	target  target // zero: in no list
	pod     string
	foreign bool
	ip      netip.Addr // zero: not counted
}

// target is where a record goes.
type target struct {
	boot uint64
	addr memberlist.Address
}

func newBook(self string, boot uint64, cluster string, p *Profile) *book {
	b := &book{
		self: self, boot: boot, cluster: cluster, profile: p, entries: make(map[string]*entry), left: make(map[uint64]bool), refused: make(map[uint64]string),
		replaced: make(map[uint64]string), pods: make(map[string]int), ips: make(map[netip.Addr]int), wake: make(chan struct{}, 1),
	}
	b.targets.Store(new([]target))
	b.direct.Store(new([]target))
	b.alive.Store(1)
	return b
}

// note takes Serf's events. It never blocks. Lists and news change together: who is told of a member finds it in the lists.
func (b *book) note(events []serf.MemberEvent, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range events {
		for _, m := range e.Members {
			if m.Name != b.self {
				b.noteOne(e.Type, m, now)
			}
		}
	}
	b.publish()
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
		b.put(m.Name, e)
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
		b.put(m.Name, e)
		if t == serf.EventMemberLeave {
			b.tell(m.Name, e, MemberLeft)
			b.remember(e.id.Boot)
		} else {
			b.tell(m.Name, e, MemberFailed)
		}
	case serf.EventMemberReap:
		if e != nil {
			e.alive = false
			b.put(m.Name, e)
			b.tell(m.Name, e, MemberGone)
			delete(b.refused, e.id.Boot)
			b.forgetReplaced(e.id.Boot)
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

// put brings the lists in line with an entry that changed; publish shows them. Each join and leave does this at every
// agent, so it costs a search and not a sort: with 300 members, lists made anew were a fifth of what gossip takes to start.
// Caller holds mu.
func (b *book) put(name string, e *entry) {
	var now place
	if e.alive {
		now.ip, now.foreign = e.ip, e.stock
		if !e.stock {
			now.target, now.pod = target{boot: e.id.Boot, addr: memberlist.Address{Addr: e.addr, Name: name}}, e.id.pod
		}
	}
	if e.in == now {
		return
	}
	was := e.in
	e.in = now
	if was.target != now.target {
		b.changed = true
		if was.target != (target{}) {
			i, _ := b.search(was.target)
			b.peers = slices.Delete(b.peers, i, i+1)
		}
		if now.target != (target{}) {
			i, _ := b.search(now.target)
			b.peers = slices.Insert(b.peers, i, now.target)
		}
	}
	count(b.pods, was.pod, now.pod)
	if was.foreign != now.foreign {
		if now.foreign {
			b.foreign.Add(1)
		} else {
			b.foreign.Add(-1)
		}
	}
	b.ipMu.Lock()
	count(b.ips, was.ip, now.ip)
	b.ipMu.Unlock()
}

// count moves one from a key to another; the zero key is not counted.
func count[K comparable](m map[K]int, was, now K) {
	var zero K
	if was != zero {
		if m[was]--; m[was] == 0 {
			delete(m, was)
		}
	}
	if now != zero {
		m[now]++
	}
}

// search finds the place of a target in the list.
func (b *book) search(t target) (int, bool) {
	return slices.BinarySearchFunc(b.peers, t, func(x, y target) int { return before(b.boot, x, y) })
}

// publish shows the lists as they are, and wakes who tells the news. Caller holds mu.
func (b *book) publish() {
	if b.changed {
		b.changed = false
		ts := slices.Clone(b.peers)
		direct := ts
		if len(ts) > b.profile.DirectMax {
			direct = ts[:b.profile.WatchSet:b.profile.WatchSet]
		}
		b.targets.Store(&ts)
		b.direct.Store(&direct)
		b.alive.Store(int64(len(ts) + 1))
	}
	if len(b.pending) > 0 {
		select {
		case b.wake <- struct{}{}:
		default:
		}
	}
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
	if b.pods[id.pod] < 2 { // the usual case, without a search; an empty name is not counted
		return nil
	}
	var out []news
	for name, e := range b.entries {
		if e.alive && !e.stock && e.id.pod == id.pod && e.id.Boot != id.Boot {
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
	b.put(name, e)
	b.tell(name, e, MemberReplaced)
	b.replaced[e.id.Boot] = name
	b.anyReplaced.Store(true)
	b.publish()
	return true
}

// revive undoes replace when a record of the member arrives. It is called for every parked record, by the packet goroutine.
func (b *book) revive(boot uint64) {
	if !b.anyReplaced.Load() {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	name, ok := b.replaced[boot]
	if !ok {
		return
	}
	b.forgetReplaced(boot)
	if e := b.entries[name]; e != nil && e.id.Boot == boot && e.event == MemberReplaced && !e.alive {
		e.alive = true
		b.put(name, e)
		b.tell(name, e, MemberJoined)
		b.publish()
	}
}

func (b *book) forgetReplaced(boot uint64) {
	delete(b.replaced, boot)
	b.anyReplaced.Store(len(b.replaced) > 0)
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
