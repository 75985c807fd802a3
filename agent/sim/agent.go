package sim

import (
	"math/rand/v2"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// agent is one replica: its engine, and what its agent knows.
type agent struct {
	i, zone int32
	alive   bool
	boot    uint64
	life    uint64 // starts so far
	ready   int64  // since when it is ready, after a restart; 0 = from the start
	engine  *enginesim.Engine
	busy    time.Duration // of engines that died

	table  *routing.Table
	peers  []*routing.Peer // by replica; nil = not a member
	policy routing.Policy
	rnd    *rand.Rand
	digest *routing.Digest

	account account
	seq     uint32
	kv      float64 // used share, at the last reading
	entered int     // prompt tokens let in since then

	held       []*request
	heldTokens int
	turning    bool // a look at the gate by the clock is under way

	expected []expectation // requests that victims promised
	pulling  bool
	pause    int64 // before the next pull that nothing new calls for

	published [ring]publication
	nPublish  int   // records published so far
	heard     []int // by replica: how many of its records we are past
}

// expectation is prompt tokens on their way here, as a victim said.
type expectation struct {
	tokens int
	until  int64
}

// publication is a record that was sent to all.
type publication struct {
	at     int64
	report routing.Report
	now    bool // sent at once, several times: nobody misses it
}

// ring is how many records of an agent are remembered for those that have not heard them.
const ring = 8

// bootOf returns the boot id of a replica's n-th life.
func bootOf(i int32, life uint64) uint64 { return life<<32 | uint64(i+1) }

// replicaOf is the other way round.
func replicaOf(boot uint64) int32 { return int32(uint32(boot)) - 1 }

// zoneNames are as many as there may be replicas.
func zoneName(z int32) string { return "z" + string('a'+z%26) + string('0'+z/26) }

func (a *agent) member() routing.Member {
	return routing.Member{Boot: a.boot, Zone: zoneName(a.zone), Version: routing.AskVersion}
}

// begin starts an agent's life: nothing known, but the members.
func (s *Sim) begin(a *agent, now int64) {
	a.boot = bootOf(a.i, a.life)
	a.alive = true
	p := s.cfg.Engine
	p.Speed = s.cfg.speed(int(a.i))
	a.engine = enginesim.New(p)
	a.account, a.kv, a.entered = account{}, 0, 0
	a.seq, a.expected, a.pulling, a.pause = 0, nil, false, 0
	a.digest = routing.NewDigest(p.KVTokens)
	a.policy, _ = s.spec.policy() // was tried
	a.table = routing.NewTable(a.member())
	a.table.SetOwnDigest(a.digest)
	a.table.SetLive(func() routing.Live { return s.look(a) })
	a.peers = make([]*routing.Peer, len(s.agents))
	var all []routing.Member
	for _, b := range s.agents {
		if b.alive {
			all = append(all, b.member())
		}
	}
	a.table.SetMembers(all, s.time(now))
	for _, b := range s.agents {
		if b.alive {
			s.know(a, b, now)
		}
	}
}

// meet makes b a member at a.
func (s *Sim) meet(a, b *agent, now int64) {
	a.table.SetMember(b.member(), s.time(now))
	s.know(a, b, now)
}

// know takes what a learns of a new member over the peer port.
func (s *Sim) know(a, b *agent, now int64) {
	p := a.table.Peer(b.boot)
	a.peers[b.i] = p
	if a == b {
		return
	}
	p.SetRTT(2 * s.hop(a.i, b.i))
	if s.spec.digest {
		blocks, seq := b.digest.Blocks()
		a.table.SetDigest(b.boot, seq, blocks, s.time(now))
	}
}

// hop is the way from one agent to another.
func (s *Sim) hop(i, j int32) time.Duration {
	switch {
	case i == j:
		return 0
	case s.agents[i].zone != s.agents[j].zone:
		return s.cfg.ZoneHop
	}
	return s.cfg.Hop
}

// look is the exact state of an agent's own replica.
func (s *Sim) look(a *agent) routing.Live {
	c := &a.account
	l := routing.Live{Running: c.running, Waiting: c.waiting, Held: len(a.held), PendingTokens: c.pending,
		HeldTokens: a.heldTokens, PrefillRate: c.credited(a.table.Rate(), s.now).Or(0), KVUsed: a.kv}
	if s.spec.exact {
		x := a.engine.Load()
		l.PendingTokens = x.Pending
		l.KVUsed = float64(x.KVUsed) / float64(s.cfg.Engine.KVTokens)
		l.PrefillRate = a.engine.Params().PrefillRate()
	}
	return l
}

// report is the record that an agent would send now.
func (s *Sim) report(a *agent, now int64) routing.Report {
	a.seq++
	c := &a.account
	r := routing.Report{Boot: a.boot, Seq: a.seq, State: routing.StateReady, Heartbeat: max(time.Second, 2*s.cfg.GossipAge),
		Running: routing.Some(c.running), Waiting: routing.Some(c.waiting), Held: routing.Some(len(a.held)),
		RunLimit:      routing.Some(s.cfg.Engine.Slots),
		PendingTokens: routing.Some(c.pending), HeldTokens: routing.Some(a.heldTokens), Accepted: routing.Some(c.accepted),
		KVCapacity: routing.Some(s.cfg.Engine.KVTokens), KVUsed: routing.Some(a.kv), PrefillRate: c.credited(a.table.Rate(), now)}
	if a.life > 0 {
		r.ReadyFor = routing.Some(time.Duration(now - a.ready))
	}
	return r
}

// publish sends the record to all. What each has heard is found out when it needs it.
func (s *Sim) publish(a *agent, now int64, atOnce bool) {
	a.published[a.nPublish%ring] = publication{now, s.report(a, now), atOnce}
	a.nPublish++
	a.table.Update(a.published[(a.nPublish-1)%ring].report, s.time(now))
}

// listen brings a's table up to what it has heard by now: of each peer the newest record that has arrived.
func (s *Sim) listen(a *agent, now int64) {
	for j, b := range s.agents {
		if b == a || b.nPublish == a.heard[j] {
			continue
		}
		for k := b.nPublish - 1; k >= a.heard[j] && k > b.nPublish-1-ring; k-- {
			p := &b.published[k%ring]
			if !p.now && s.lost(a.i, b.i, uint64(k)) {
				continue
			}
			came := p.at + int64(s.hop(a.i, b.i))
			if came > now {
				continue
			}
			r := p.report
			r.Age = time.Duration(now - came)
			a.table.Update(r, s.time(now))
			a.heard[j] = k + 1
			break
		}
	}
}

// lost draws whether a message number k of b never reaches a.
func (s *Sim) lost(a, b int32, k uint64) bool {
	if s.cfg.Loss == 0 {
		return false
	}
	h := mix(mix(uint64(a)<<32|uint64(b)) ^ k ^ s.cfg.Seed<<40)
	return float64(h>>11)/(1<<53) < s.cfg.Loss
}

// tell puts a's present record into b's table, as an answer between them would.
func (s *Sim) tell(b, a *agent, r routing.Report, now int64) {
	if b != a && b.alive {
		b.table.Update(r, s.time(now))
	}
}

// share publishes the changes of a's digest.
func (s *Sim) share(a *agent, now int64) {
	d, ok := a.digest.Delta(a.boot, routing.DeltaMax)
	if !ok {
		return
	}
	for _, b := range s.agents {
		if b == a || !b.alive {
			continue
		}
		if s.lost(b.i, a.i, uint64(d.Seq)|1<<39) {
			continue
		}
		if !b.table.ApplyDelta(d, s.time(now)) { // a gap: the whole is pulled over the peer port
			blocks, seq := a.digest.Blocks()
			b.table.SetDigest(a.boot, seq, blocks, s.time(now))
		}
	}
}
