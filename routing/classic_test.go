package routing

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// turns returns the boots of n picks, each sent and never done if keep.
func turns(p Policy, tbl *Table, r Request, n int, keep bool) []uint64 {
	var out []uint64
	rnd := rand.New(rand.NewPCG(1, 2))
	for range n {
		d := p.Pick(tbl.Snapshot(), &r, t0, rnd)
		out = append(out, d.Peer.Boot())
		if keep {
			d.Peer.Sent(r.PromptTokens, t0)
		}
	}
	return out
}

func TestRoundRobin(t *testing.T) {
	p := mustPolicy(t, "round_robin")
	tbl := newFleet(3)
	m := Request{Model: "m"}
	assert.Equal(t, []uint64{1, 2, 3, 1, 2}, turns(p, tbl, m, 5, false))
	tbl.RemoveMember(3, t0)
	assert.Equal(t, []uint64{1, 2, 1}, turns(p, tbl, m, 3, false), "goes on where it was")
	tbl.SetMember(Member{Boot: 9}, t0)
	tbl.SetModels(9, []Model{{ID: "m"}, {ID: "n"}}, 0, t0)
	tbl.Update(ready(9, 1), t0)
	assert.Equal(t, []uint64{2, 9, 1}, turns(p, tbl, m, 3, false))
	assert.Equal(t, []uint64{9, 9}, turns(p, tbl, Request{Model: "n"}, 2, false), "each model has its own turn")
	assert.Equal(t, []uint64{2}, turns(p, tbl, m, 1, false))
}

func TestSmoothWeightedRoundRobin(t *testing.T) {
	tbl := newFleet(3)
	r := ready(1, 2)
	r.Weight = Some(5.0)
	tbl.Update(r, t0)
	// the sequence of nginx's own commit message: a a b a c a a
	assert.Equal(t, []uint64{1, 1, 2, 1, 3, 1, 1, 1, 1, 2, 1, 3, 1, 1},
		turns(mustPolicy(t, "weighted_round_robin"), tbl, Request{Model: "m"}, 14, false))
}

func TestLeastRequestsAndTokens(t *testing.T) {
	tbl := newFleet(3)
	for b, n := range map[uint64][2]int{1: {5, 0}, 2: {2, 9000}, 3: {3, 100}} {
		r := ready(b, 2)
		r.Running, r.PendingTokens = Some(n[0]), Some(n[1])
		tbl.Update(r, t0)
	}
	m := Request{Model: "m", PromptTokens: 10}
	assert.Equal(t, []uint64{2, 2, 2}, turns(mustPolicy(t, "least_requests"), tbl, m, 3, false))
	assert.Equal(t, []uint64{3, 3}, turns(mustPolicy(t, "least_tokens"), tbl, m, 2, false), "5·256 > 3·256 + 100")
	assert.Equal(t, []uint64{1, 1}, turns(mustPolicy(t, "least_tokens", WithOutputTokens(0)), tbl, m, 2, false))
	// own sends count at once
	got := turns(mustPolicy(t, "least_requests"), tbl, m, 2, true)
	assert.Equal(t, uint64(2), got[0])
	assert.Contains(t, []uint64{2, 3}, got[1])
}

func TestEWMA(t *testing.T) {
	tbl := newFleet(2)
	a, b := tbl.Peer(1), tbl.Peer(2)
	see := func(p *Peer, ms int, at time.Duration) {
		p.Observe(time.Second, time.Duration(ms)*time.Millisecond, t0.Add(at))
	}
	see(a, 100, 0)
	see(b, 200, 0)
	m := Request{Model: "m"}
	assert.Equal(t, []uint64{1, 1, 1}, turns(mustPolicy(t, "ewma"), tbl, m, 3, false))
	a.Sent(1, t0)
	a.Sent(1, t0)
	assert.Equal(t, []uint64{2, 2}, turns(mustPolicy(t, "ewma"), tbl, m, 2, false), "100 ms · 3 > 200 ms · 1")
	a.Done(OutcomeOK, 1, t0)
	a.Done(OutcomeOK, 1, t0)
	see(a, 900, time.Second)
	assert.Equal(t, Some(900*time.Millisecond), a.Latency(), "a peak counts whole, at once")
	see(a, 100, 11*time.Second)
	got := a.Latency().V.Seconds()
	assert.InDelta(t, 0.1+0.8/2.718281828, got, 0.001, "and fades by age: one e-th after 10 s")
}

func TestConsistentHash(t *testing.T) {
	tbl := newFleet(8)
	p := mustPolicy(t, "consistent_hash")
	rnd := rand.New(rand.NewPCG(1, 2))
	owner := func(session uint64) uint64 {
		return p.Pick(tbl.Snapshot(), &Request{Model: "m", Session: session}, t0, rnd).Peer.Boot()
	}
	before := map[uint64]uint64{}
	count := map[uint64]int{}
	for k := uint64(1); k <= 4000; k++ {
		before[k] = owner(k)
		count[before[k]]++
		assert.Equal(t, before[k], owner(k))
	}
	for b, n := range count {
		assert.InDelta(t, 500, n, 200, "boot %d", b)
	}
	tbl.SetMember(Member{Boot: 99}, t0)
	tbl.SetModels(99, []Model{{ID: "m"}}, 0, t0)
	tbl.Update(ready(99, 1), t0)
	moved := 0
	for k, b := range before {
		if now := owner(k); now != b {
			moved++
			assert.Equal(t, uint64(99), now, "a key moves only to the new one")
		}
	}
	assert.InDelta(t, 4000/9, moved, 150)

	prefix := Request{Model: "m", Prefix: []uint64{77, 1}}
	first := p.Pick(tbl.Snapshot(), &prefix, t0, rnd).Peer
	prefix.Prefix[1] = 2
	assert.Same(t, first, p.Pick(tbl.Snapshot(), &prefix, t0, rnd).Peer, "without a session the first block is the key")
}

func TestConsistentHashBoundedLoad(t *testing.T) {
	tbl := newFleet(8)
	p := mustPolicy(t, "consistent_hash")
	rnd := rand.New(rand.NewPCG(1, 2))
	r := Request{Model: "m", Session: 5} // one hot key
	for i := range 800 {
		d := p.Pick(tbl.Snapshot(), &r, t0, rnd)
		d.Peer.Sent(1, t0)
		limit := int(1.25*float64(i+1)/8) + 1
		require.LessOrEqual(t, d.Peer.Inflight(), limit, "after %d", i+1)
	}
	unbound := mustPolicy(t, "consistent_hash", WithBound(0))
	assert.Len(t, pickableOf(unbound, tbl, r, 100), 1)
}

func pickableOf(p Policy, tbl *Table, r Request, n int) map[uint64]bool {
	out := map[uint64]bool{}
	for _, b := range turns(p, tbl, r, n, false) {
		out[b] = true
	}
	return out
}

func TestRendezvousOwners(t *testing.T) {
	g := newFleet(40).Snapshot().models["m"]
	count := make([]int, 40)
	for key := range uint64(20_000) {
		a, b := g.ownersOf(key)
		require.NotEqual(t, a, b)
		count[a]++
		a2, b2 := g.ownersOf(key)
		require.Equal(t, [2]int{a, b}, [2]int{a2, b2})
	}
	for i, n := range count {
		assert.InDelta(t, 500, n, 200, "%d", i)
	}
	tbl := newFleet(40)
	tbl.RemoveMember(17, t0)
	h := tbl.Snapshot().models["m"]
	for key := range uint64(5000) {
		a, b := g.ownersOf(key)
		a2, _ := h.ownersOf(key)
		was, second, is := g.entries[a].peer.boot, g.entries[b].peer.boot, h.entries[a2].peer.boot
		if was == 17 {
			require.Equal(t, second, is, "the second owner takes over")
		} else {
			require.Equal(t, was, is, "others' keys stay")
		}
	}
	one := newFleet(1).Snapshot().models["m"]
	a, b := one.ownersOf(3)
	assert.Equal(t, [2]int{0, -1}, [2]int{a, b})
}
