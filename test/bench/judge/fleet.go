package main

import (
	"math/rand/v2"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// message is any line that simlab sends; each op uses some of the fields.
type message struct {
	Op     string  `json:"op"`
	N      int     `json:"n"`
	Seed   uint64  `json:"seed"`
	Agent  int     `json:"agent"`
	Peer   int     `json:"peer"`
	Now    float64 `json:"now"` // s
	ID     int     `json:"id"`
	Cached int     `json:"cached"`
	Status int     `json:"status"` // 0 ok, 1 failed
	S      snap    `json:"s"`
	Req    request `json:"req"`
}

// snap is a replica's state; pend counts the tokens held at its agent too, and wait the requests.
type snap struct {
	T     float64 `json:"t"`
	Wait  int     `json:"wait"`
	Run   int     `json:"run"`
	Pend  float64 `json:"pend"`
	KV    float64 `json:"kv"`
	KVCap float64 `json:"kvcap"`
	Rate  float64 `json:"rate"`
	Step  float64 `json:"step"`
	Alive bool    `json:"alive"`
}

type request struct {
	ID     int      `json:"id"`
	In     int      `json:"in"`
	Hashes []uint32 `json:"hashes"`
	Known  []int    `json:"known"` // leading blocks each peer is known to hold
}

// fleet is the agents of one run.
type fleet struct {
	policy routing.Policy
	agents []*agent
}

// agent is one agent's side: its table, and its requests under way.
type agent struct {
	table   *routing.Table
	rnd     *rand.Rand
	live    routing.Live
	alive   bool
	seq     uint32
	pending routing.Decision // between shortlist and pick
	flights map[int]flight
}

type flight struct {
	peer      *routing.Peer
	tokens    int
	predicted time.Duration
	sent      time.Time
	first     bool
}

// boot returns the boot id of a peer.
func boot(peer int) uint64 { return uint64(peer) + 1 }

// at converts simulated seconds.
func at(s float64) time.Time { return time.Unix(1_000_000, 0).Add(time.Duration(s * 1e9)) }

func newFleet(n int, seed uint64, policy routing.Policy) *fleet {
	f := &fleet{policy: policy}
	for i := range n {
		a := &agent{alive: true, rnd: rand.New(rand.NewPCG(seed, uint64(i))), flights: map[int]flight{}}
		a.table = routing.NewTable(routing.Member{Boot: boot(i), Version: routing.AskVersion})
		for j := range n {
			a.table.SetMember(routing.Member{Boot: boot(j), Version: routing.AskVersion}, at(0))
		}
		a.table.SetLive(func() routing.Live { return a.live })
		f.agents = append(f.agents, a)
	}
	return f
}

// report turns a state into the record that the product would have sent. The sequence follows the time of the sample,
// so that of gossip and piggyback the newer one stays.
func report(peer int, s snap, now float64) routing.Report {
	r := routing.Report{Boot: boot(peer), Seq: uint32(int64(s.T * 1e5)), State: routing.StateReady, Heartbeat: time.Hour,
		Age:     time.Duration(max(0, now-s.T) * 1e9),
		Running: routing.Some(s.Run), Waiting: routing.Some(s.Wait), Held: routing.Some(0),
		PendingTokens: routing.Some(int(s.Pend)), HeldTokens: routing.Some(0),
		KVCapacity: routing.Some(int(s.KVCap)), KVUsed: routing.Some(s.KV / max(1, s.KVCap)),
		PrefillRate: routing.Some(s.Rate), DecodeStep: routing.Some(time.Duration(s.Step * 1e9))}
	if !s.Alive {
		r.Flags = routing.FlagEngineDown
	}
	return r
}

func (f *fleet) update(m message) {
	f.agents[m.Agent].table.Update(report(m.Peer, m.S, m.Now), at(m.Now))
	f.agents[m.Peer].set(m.Peer, m.S, m.Now)
}

func (f *fleet) local(m message) { f.agents[m.Agent].set(m.Agent, m.S, m.Now) }

// set gives an agent its own exact state. The newest of what anybody was told stands; an answer to a question is
// newer than all of it.
func (a *agent) set(self int, s snap, now float64) {
	if s.T < now {
		return // an old report: says nothing about now
	}
	a.live = routing.Live{Running: s.Run, Waiting: s.Wait, PendingTokens: int(s.Pend), PrefillRate: s.Rate, KVUsed: s.KV / max(1, s.KVCap)}
	r := report(self, s, now)
	a.seq++
	r.Seq = a.seq
	a.table.Update(r, at(now))
}

// routed returns the request as the proxy's peek would fill it.
func routed(q request) *routing.Request {
	r := &routing.Request{PromptTokens: q.In}
	for _, h := range q.Hashes {
		r.Prefix = append(r.Prefix, (uint64(h)*0x9E3779B97F4A7C15<<32|uint64(h))&^routing.FineBlock)
	}
	return r
}

// learn gives an agent what is known about who holds the request's blocks.
func (a *agent) learn(q request, now time.Time) {
	for j, n := range q.Known {
		a.table.SetDigest(boot(j), 1, q.Hashes[:n], now)
	}
}

// own gives an agent its own exact digest, as far as the request needs it.
func (a *agent) own(q request, known int) {
	d := routing.NewDigest(0)
	d.Restore(q.Hashes[:known])
	a.table.SetOwnDigest(d)
}

func (f *fleet) shortlist(m message) []int {
	a := f.agents[m.Agent]
	if m.Req.Known != nil {
		a.learn(m.Req, at(m.Now))
		a.own(m.Req, m.Req.Known[m.Agent])
	}
	a.pending = f.policy.Pick(a.table.Snapshot(), routed(m.Req), at(m.Now), a.rnd)
	ask := []int{}
	for _, p := range a.pending.Asked() {
		if !p.Self() {
			ask = append(ask, int(p.Boot())-1)
		}
	}
	return ask
}

func (f *fleet) pick(m message) int {
	a := f.agents[m.Agent]
	d, r := a.pending, routed(m.Req)
	var answers []routing.Answer
	for i, p := range d.Asked() {
		j := int(p.Boot()) - 1
		b := f.agents[j]
		if m.Req.Known != nil {
			b.own(m.Req, m.Req.Known[j])
		}
		x := b.table.Answer(r, at(m.Now))
		x.Index = i
		answers = append(answers, x)
	}
	a.pending = routing.Settle(&d, answers)
	if a.pending.Peer == nil {
		return m.Agent
	}
	return int(a.pending.Peer.Boot()) - 1
}

func (f *fleet) sent(m message) {
	a := f.agents[m.Agent]
	p := a.table.Peer(boot(m.Peer))
	x := flight{peer: p, tokens: a.pending.Tokens, predicted: time.Duration(a.pending.First * 1e9), sent: at(m.Now)}
	p.Sent(x.tokens, at(m.Now))
	a.flights[m.ID] = x
}

func (f *fleet) first(m message) {
	a := f.agents[m.Agent]
	x, ok := a.flights[m.ID]
	if !ok || x.first {
		return
	}
	x.first = true
	a.flights[m.ID] = x
	x.peer.FirstToken(x.tokens, at(m.Now))
	x.peer.Observe(x.predicted, at(m.Now).Sub(x.sent), at(m.Now))
}

func (f *fleet) done(m message) {
	a := f.agents[m.Agent]
	x, ok := a.flights[m.ID]
	if !ok {
		return
	}
	delete(a.flights, m.ID)
	tokens := x.tokens
	if x.first {
		tokens = 0
	}
	o := routing.OutcomeOK
	if m.Status != 0 {
		o = routing.OutcomeReset
	}
	x.peer.Done(o, tokens, at(m.Now))
}
