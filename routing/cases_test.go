package routing

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// C53: all three answer 500 for 5 s. At most one may be put aside, so that requests go on reaching engines, and as soon as
// they recover all of them are taken again within their ejection's time. A fleet that is mostly aside is in a panic, which
// each pick's reason shows (TestPanic).
func TestC53AllFailAtOnce(t *testing.T) {
	tbl := newFleet(3)
	p := mustPolicy(t, "auto", WithAsk(0))
	rnd := newRand(1)
	now, got := t0, map[uint64]int{}
	beat := func() {
		for b := uint64(1); b <= 3; b++ {
			tbl.Update(ready(b, uint32(now.Sub(t0)/(10*time.Millisecond))+2), now)
		}
	}
	for ; now.Before(t0.Add(5 * time.Second)); now = now.Add(10 * time.Millisecond) {
		beat()
		d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 100}, now, rnd)
		require.NotNil(t, d.Peer, "somebody is always tried")
		end(d.Peer, OutcomeServerError, now)
	}
	ejected := 0
	for b := uint64(1); b <= 3; b++ {
		if stateOf(tbl.Peer(b), now) == StateEjected {
			ejected++
		}
	}
	assert.LessOrEqual(t, ejected, 1)
	for until := now.Add(time.Second); now.Before(until); now = now.Add(10 * time.Millisecond) {
		beat()
		d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 100}, now, rnd)
		require.NotNil(t, d.Peer)
		end(d.Peer, OutcomeOK, now)
		got[d.Peer.Boot()]++
	}
	assert.NotEmpty(t, got, "served at once after the recovery")

	for b := uint64(2); b <= 3; b++ {
		r := ready(b, 1<<20)
		r.Flags = FlagSuspect
		tbl.Update(r, now)
	}
	r := ready(1, 1<<20)
	r.Flags = FlagSuspect
	tbl.Update(r, now)
	assert.Equal(t, ReasonPanic, p.Pick(tbl.Snapshot(), &Request{Model: "m"}, now, rnd).Reason, "a panic shows")
}

// C81: a member that was taken for dead for a moment comes back as it was: no slow start, and meanwhile nobody else's
// prefixes or sessions moved.
func TestC81BackAsBefore(t *testing.T) {
	tbl := newFleet(8)
	up := func(seq uint32) {
		r := ready(2, seq)
		r.ReadyFor = Some(time.Hour)
		tbl.Update(r, t0)
	}
	up(2)
	p := mustPolicy(t, "consistent_hash")
	at := func(session uint64) uint64 {
		return p.Pick(tbl.Snapshot(), &Request{Model: "m", Session: session}, t0, newRand(1)).Peer.Boot()
	}
	const sessions = 2000
	var before [sessions]uint64
	for i := range before {
		before[i] = at(uint64(i + 1))
	}
	tbl.RemoveMember(2, t0)
	moved := 0
	for i, b := range before {
		if now := at(uint64(i + 1)); now != b {
			moved++
			assert.EqualValues(t, 2, b, "only its own move")
		}
	}
	assert.InDelta(t, sessions/8, moved, sessions/20)
	tbl.SetMember(Member{Boot: 2, Version: AskVersion}, t0)
	tbl.SetModels(2, []Model{{ID: "m"}}, 0, t0)
	up(3)
	for i, b := range before {
		assert.Equal(t, b, at(uint64(i+1)))
	}
	peer := tbl.Peer(2)
	assert.InDelta(t, 1, peer.ramp(peer.view.Load(), tbl.Snapshot(), tbl.clock.tick(t0)), 1e-9, "no slow start")
}

// C87: nothing but the start and the end of a request changes what is in flight: not a hundred records, not ten changes of
// health, not ejection and return.
func TestC87OnlyRequestsCount(t *testing.T) {
	tbl := newFleet(5)
	p := tbl.Peer(2)
	const open = 7
	for range open {
		p.Sent(100, t0)
	}
	now := t0
	for i := range 100 {
		now = now.Add(time.Second)
		r := ready(2, uint32(i+2))
		if i/10%2 == 1 {
			r.Flags = FlagEngineDown | FlagSuspect
		}
		tbl.Update(r, now)
		tbl.SetMember(Member{Boot: 2, Version: AskVersion}, now)
		_ = p.Health(now)
		require.Equal(t, open, p.Inflight())
		require.Equal(t, open*100, p.InflightTokens())
	}
	tbl.Update(ready(2, 200), now)
	for range 5 {
		end(p, OutcomeServerError, now)
	}
	require.Equal(t, StateEjected, stateOf(p, now))
	assert.Equal(t, open, p.Inflight())
	for range open {
		p.Done(OutcomeOK, 100, now)
	}
	assert.Zero(t, p.Inflight())
	assert.Zero(t, p.InflightTokens())
}

// C88: 16 agents with the same old records, in which one replica has just become idle, send 20 requests each within 50 ms.
// What an agent sent since the record counts at once, so even without a question an agent's own do not pile up; by default
// all of a small fleet are asked, and then the idle one is filled up to the others and no further.
func TestC88BurstOnOldNumbers(t *testing.T) {
	const agents, each, before, prompt = 16, 20, 8, 1000
	for name, policy := range map[string]Policy{"p2c": mustPolicy(t, "p2c"), "auto": mustPolicy(t, "auto")} {
		var tables [agents]*Table
		for a := range tables {
			tables[a] = newFleet(agents)
			for b := uint64(1); b <= agents; b++ {
				if b != 5 {
					r := ready(b, 2)
					r.Running, r.PendingTokens = Some(before), Some(before*prompt)
					tables[a].Update(r, t0)
				}
			}
		}
		inflight := map[uint64]int{}
		for b := uint64(1); b <= agents; b++ {
			if b != 5 {
				inflight[b] = before
			}
		}
		for i := range each {
			now := t0.Add(500*time.Millisecond + time.Duration(i)*50*time.Millisecond/each)
			var sent []uint64
			for a, tbl := range tables { // all at the same moment: they hear the same answers
				d := policy.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: prompt}, now, newRand(uint64(a*each+i)))
				if d.Asks > 0 {
					var answers []Answer
					for k, p := range d.Ask[:d.Asks] {
						answers = append(answers, Answer{Index: k, Score: float64((inflight[p.Boot()]+1)*prompt) / 10_000, Tokens: prompt, OK: true})
					}
					d = Settle(&d, answers)
				}
				d.Peer.Sent(prompt, now)
				sent = append(sent, d.Peer.Boot())
			}
			for _, b := range sent {
				inflight[b]++
			}
		}
		most, sum := 0, 0
		for _, n := range inflight {
			most, sum = max(most, n), sum+n
		}
		ratio := float64(most) / (float64(sum) / agents)
		t.Logf("%s: at most %d in flight, %.2f of the mean", name, most, ratio)
		assert.Less(t, ratio, map[string]float64{"p2c": 2, "auto": 1.5}[name], name)
	}
}

// C89: a prompt that nobody has cached goes by load alone, however small or large the caches are.
func TestC89NoHitIsPlainLoad(t *testing.T) {
	tbl := newFleet(3)
	tbl.SetDigest(2, 1, digestOf(chain(1, 2)), t0) // next to nothing, and drowning
	r := ready(2, 2)
	r.Running, r.PendingTokens = Some(50), Some(50_000)
	tbl.Update(r, t0)
	tbl.SetDigest(3, 1, digestOf(chain(2, 4000)), t0) // much, and idle
	r = ready(1, 2)
	r.PendingTokens = Some(90_000)
	tbl.Update(r, t0)
	got, p, rnd := map[uint64]int{}, mustPolicy(t, "auto", WithAsk(0)), newRand(1)
	for i := range uint64(200) {
		d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 1000, Prefix: chain(100+i, 2)}, t0, rnd)
		d.Peer.Sent(200, t0)
		got[d.Peer.Boot()]++
	}
	assert.Less(t, got[2], 20, "%v", got)
}

func digestOf(prefix []uint64) (out []uint32) {
	for _, h := range prefix {
		out = append(out, uint32(h))
	}
	return out
}

// C90: what is cached is worth the time that it saves, and no more: a hot prefix spreads as soon as waiting for its holder
// takes longer than computing it elsewhere, while a cold prefix stays with its own holder. There is no switch that turns
// affinity off, and no factor to set.
func TestC90HotPrefixIsBounded(t *testing.T) {
	tbl := newFleet(4)
	hot, cold := chain(1, 4), chain(2, 4)
	set := func(boot uint64, seq uint32, pending int) {
		r := ready(boot, seq)
		r.PendingTokens = Some(pending)
		tbl.Update(r, t0)
	}
	set(1, 2, 50_000) // ourselves: busy, so that staying is no choice
	tbl.SetDigest(2, 1, digestOf(hot), t0)
	tbl.SetDigest(3, 1, digestOf(cold), t0)
	p, rnd := mustPolicy(t, "auto", WithAsk(0)), newRand(1)
	pick := func(prefix []uint64) *Peer {
		return p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 4 * PrefixBlockTokens, Prefix: prefix}, t0, rnd).Peer
	}
	assert.EqualValues(t, 2, pick(hot).Boot(), "its holder, while it is idle")
	assert.EqualValues(t, 3, pick(cold).Boot())
	// Requests with the hot prefix come faster than anyone computes.
	most, stays := 0, 0
	for range 400 {
		x := pick(hot)
		x.Sent(4*PrefixBlockTokens, t0)
		most = max(most, tbl.Peer(2).Inflight()-min(tbl.Peer(3).Inflight(), tbl.Peer(4).Inflight()))
		if pick(cold).Boot() == 3 {
			stays++
		}
	}
	t.Logf("in flight %d, %d, %d: at most %d more at the holder; cold at its own in %d of 400", tbl.Peer(2).Inflight(), tbl.Peer(3).Inflight(), tbl.Peer(4).Inflight(), most, stays)
	// Its 2,048 cached tokens are worth some 0.2 s at 10,000 a second; the rest is the same work at all of them.
	assert.LessOrEqual(t, most, 12, "the holder is ahead by what its cache saves")
	assert.LessOrEqual(t, tbl.Peer(2).Inflight(), 400/3+12)
	assert.GreaterOrEqual(t, stays, 380)
}

// C91: a replica that says it is full is no candidate while another is not, and only when all are full is anything refused.
func TestC91FullOnesAreLeftAlone(t *testing.T) {
	for _, policy := range []string{"auto", "p2c", "least_requests"} {
		tbl := newFleet(4)
		full := func(boot uint64, seq uint32) {
			r := ready(boot, seq)
			r.Flags = FlagSaturated
			tbl.Update(r, t0)
		}
		full(1, 2)
		full(2, 2)
		full(3, 2)
		r := ready(4, 2)
		r.Running, r.PendingTokens = Some(60), Some(80_000) // full of work, but under its limit
		tbl.Update(r, t0)
		assert.Equal(t, map[uint64]int{4: 200}, pickable(t, policy, tbl, Request{Model: "m"}, t0, 200), policy)
		full(4, 3)
		d := mustPolicy(t, policy).Pick(tbl.Snapshot(), &Request{Model: "m"}, t0, newRand(1))
		assert.Nil(t, d.Peer)
		assert.Equal(t, ReasonAllFull, d.Reason)
	}
}

// C93: another zone costs 5 ms of predicted wait and nothing more: the near ones are preferred while that decides, and what
// is too much for a zone with one replica spills over. 70 % of the clients are in zone a, which has one of six replicas.
func TestC93ZonesSpillOver(t *testing.T) {
	// Each replica serves one prompt of 100 ms after the other; load is 70 % of all six. Each agent picks for the clients that
	// come to it, by records of at most 100 ms and its own sends.
	const replicas, rate, prompt = 6, 42.0, 1000
	rnd := rand.New(rand.NewPCG(5, 6))
	zone := func(boot uint64) string {
		if boot == 1 {
			return "a"
		}
		return "b"
	}
	var tables [replicas + 1]*Table
	for self := uint64(1); self <= replicas; self++ {
		tbl := NewTable(Member{Boot: self, Zone: zone(self)})
		for b := uint64(1); b <= replicas; b++ {
			tbl.SetMember(Member{Boot: b, Zone: zone(b)}, t0)
			tbl.SetModels(b, []Model{{ID: "m"}}, 0, t0)
			tbl.Update(ready(b, 1), t0)
		}
		tables[self] = tbl
	}
	var free [replicas + 1]time.Time // when it has done what it has
	for i := range free {
		free[i] = t0
	}
	p := mustPolicy(t, "auto", WithAsk(0))
	now, told, seq := t0, t0, uint32(1)
	waits, crossed, ofA := map[string][]time.Duration{}, 0, 0
	for range 20_000 {
		now = now.Add(time.Duration(rnd.ExpFloat64() / rate * float64(time.Second)))
		if now.Sub(told) > 50*time.Millisecond {
			told, seq = now, seq+1
			for _, tbl := range tables[1:] {
				for b := uint64(1); b <= replicas; b++ {
					r := ready(b, seq)
					r.PendingTokens = Some(int(max(0, free[b].Sub(now)).Seconds() * 10_000))
					tbl.Update(r, now)
				}
			}
		}
		entry := uint64(1)
		if rnd.Float64() > 0.7 {
			entry = 2 + rnd.Uint64N(replicas-1)
		}
		d := p.Pick(tables[entry].Snapshot(), &Request{Model: "m", PromptTokens: prompt}, now, rnd)
		d.Peer.Sent(prompt, now)
		d.Peer.Done(OutcomeOK, prompt, now)
		b := d.Peer.Boot()
		waits[zone(entry)] = append(waits[zone(entry)], max(0, free[b].Sub(now)))
		free[b] = now.Add(max(0, free[b].Sub(now)) + 100*time.Millisecond)
		if zone(entry) == "a" {
			if ofA++; zone(b) == "b" {
				crossed++
			}
		}
	}
	p95 := func(z string) time.Duration {
		w := slices.Sorted(slices.Values(waits[z]))
		return w[len(w)*95/100]
	}
	// Zone a's clients bring 0.7*42 = 29.4 prompts a second to a replica that does 10: at least two thirds must leave.
	t.Logf("p95 of the wait: zone a %v, zone b %v; %.2f of zone a's went over", p95("a"), p95("b"), float64(crossed)/float64(ofA))
	assert.LessOrEqual(t, (p95("a") + 100*time.Millisecond).Seconds(), 1.3*(p95("b")+100*time.Millisecond).Seconds())
	assert.InDelta(t, 1-10*0.9/29.4, float64(crossed)/float64(ofA), 0.1, "what is needed, at a near one that is never quite full")
}

// C96: a replica that comes back idle beside four busy ones is not flooded: its score is divided by its slow start, at every
// chooser, and it takes no more at once than a share of its limit (agent.TestSlowStart). Full share at the end.
func TestC96BackButNotFlooded(t *testing.T) {
	tbl := newFleet(6)
	p, rnd := mustPolicy(t, "auto", WithAsk(0)), newRand(1)
	now, seq := t0, uint32(1)
	running := map[uint64][]time.Time{} // ends of what runs there
	count := func(from, to time.Duration, fresh *int, all *int) {
		for ; now.Before(t0.Add(to)); now = now.Add(10 * time.Millisecond) { // 100 a second
			seq++
			for b := uint64(1); b <= 5; b++ {
				running[b] = slices.DeleteFunc(running[b], func(e time.Time) bool { return !e.After(now) })
				r := ready(b, seq)
				r.Running, r.RunLimit = Some(len(running[b])), Some(64)
				r.PendingTokens = Some(len(running[b]) * 30)
				r.ReadyFor = Some(now.Sub(t0) + time.Hour)
				if b == 5 {
					r.ReadyFor = Some(now.Sub(t0))
				}
				tbl.Update(r, now)
			}
			d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 300}, now, rnd)
			d.Peer.Sent(300, now)
			d.Peer.Done(OutcomeOK, 300, now)
			running[d.Peer.Boot()] = append(running[d.Peer.Boot()], now.Add(1500*time.Millisecond))
			if d.Peer.Boot() == 5 {
				*fresh++
			}
			*all++
		}
	}
	tbl.RemoveMember(6, t0)
	for b := uint64(1); b <= 4; b++ {
		for i := range 30 {
			running[b] = append(running[b], t0.Add(time.Duration(i)*50*time.Millisecond))
		}
	}
	var early, allEarly, mid, allMid, late, allLate int
	count(0, rampQuarter, &early, &allEarly)
	count(rampQuarter, 35*time.Second, &mid, &allMid)
	count(35*time.Second, 60*time.Second, &late, &allLate)
	t.Logf("share of the new one: %.3f in the first quarter, %.3f until the end of its start, %.3f after", float64(early)/float64(allEarly), float64(mid)/float64(allMid), float64(late)/float64(allLate))
	assert.LessOrEqual(t, early, allEarly/5/4+2, "a quarter of a fair share and two requests")
	assert.InDelta(t, 0.2, float64(late)/float64(allLate), 0.05)
}

const rampQuarter = 30 * time.Second / 4
