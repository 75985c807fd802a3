package routing

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func mustPolicy(t testing.TB, name string, opts ...PolicyOption) Policy {
	t.Helper()
	p, err := NewPolicy(name, opts...)
	require.NoError(t, err)
	return p
}

// pickable returns which boots the policy ever picks in n tries.
func pickable(t *testing.T, policy string, tbl *Table, r Request, now time.Time, n int) map[uint64]int {
	t.Helper()
	p := mustPolicy(t, policy)
	rnd := rand.New(rand.NewPCG(1, 2))
	out := map[uint64]int{}
	for range n {
		if d := p.Pick(tbl.Snapshot(), &r, now, rnd); d.Peer != nil {
			out[d.Peer.Boot()]++
		}
	}
	return out
}

func TestPolicyNames(t *testing.T) {
	for _, name := range PolicyNames {
		assert.Equal(t, name, mustPolicy(t, name).Name())
	}
	assert.Equal(t, "auto", mustPolicy(t, "").Name())
	_, err := NewPolicy("fastest")
	assert.ErrorContains(t, err, `unknown policy "fastest"`)
	assert.ErrorContains(t, err, "least_tokens")
}

// TestFilters says for every policy who may be picked when replica 2 has a fault and 1 and 3 are well, and who when
// all have it.
func TestFilters(t *testing.T) {
	set := func(f func(*Report)) func(*Table, uint64) {
		return func(tbl *Table, boot uint64) {
			r := ready(boot, 2)
			f(&r)
			tbl.Update(r, t0)
		}
	}
	full := func(r *Report) { r.KVUsed, r.GPUMemoryUsed = Some(0.99), Some(0.96) }
	tests := []struct {
		name  string
		fault func(*Table, uint64)
		req   Request
		out   bool   // replica 2 is not picked while others are well
		all   Reason // the reason when all have it; ReasonNone = they are picked all the same
	}{
		{name: "well", fault: func(*Table, uint64) {}},
		{name: "draining", fault: set(func(r *Report) { r.Flags = FlagDraining }), out: true, all: ReasonNoneUsable},
		{name: "goodbye", fault: set(func(r *Report) { r.Goodbye = true }), out: true, all: ReasonNoneUsable},
		{name: "engine down", fault: set(func(r *Report) { r.Flags = FlagEngineDown }), out: true},
		{name: "starting", fault: set(func(r *Report) { r.State = StateStarting }), out: true, all: ReasonNoneUsable},
		{name: "warming", fault: set(func(r *Report) { r.Flags = FlagWarming }), out: true, all: ReasonNoneUsable},
		{name: "asleep", fault: set(func(r *Report) { r.State = StateAsleep }), out: true, all: ReasonNoneUsable},
		{name: "suspect", fault: set(func(r *Report) { r.Flags = FlagSuspect }), out: true},
		{name: "GPU trouble", fault: set(func(r *Report) { r.Flags = FlagGPUTrouble }), out: true},
		{name: "metrics stale: its own books are still good", fault: set(func(r *Report) { r.Flags = FlagStale })},
		{name: "no KV and no GPU memory", fault: set(full), out: true},
		{name: "no KV, but GPU memory", fault: set(func(r *Report) { full(r); r.GPUMemoryUsed = Some(0.94) })},
		{name: "no KV, GPU memory unknown", fault: set(func(r *Report) { full(r); r.GPUMemoryUsed = Opt[float64]{} })},
		{name: "no GPU memory, but KV", fault: set(func(r *Report) { full(r); r.KVUsed = Some(0.5) })},
		{name: "refuses class 2", fault: set(func(r *Report) { r.LowestClass = 1 }), out: true, all: ReasonAllFull},
		{name: "class 1 still passes", fault: set(func(r *Report) { r.LowestClass = 1 }), req: Request{Class: 1}},
		{name: "saturated, no class said", fault: set(func(r *Report) { r.Flags = FlagSaturated }), out: true, all: ReasonAllFull},
		{name: "kept for class 1", fault: set(func(r *Report) { r.Kept = Classes{1, 1} }), out: true},
		{name: "kept for its class", fault: set(func(r *Report) { r.Kept = Classes{1, 2} })},
		{name: "refuses, and is held off besides", fault: func(tbl *Table, b uint64) {
			set(func(r *Report) { r.LowestClass = 1 })(tbl, b)
			tbl.Peer(b).HoldOff(time.Second, t0)
		}, out: true, all: ReasonAllFull},
		{name: "other service", fault: func(tbl *Table, b uint64) {
			tbl.SetModels(b, []Model{{ID: "m"}}, ServeEmbeddings|ServeRerank, t0)
		}, req: Request{Service: ServeChat}, out: true, all: ReasonNoService},
		{name: "one of its services", fault: func(tbl *Table, b uint64) {
			tbl.SetModels(b, []Model{{ID: "m"}}, ServeChat|ServeRerank, t0)
		}, req: Request{Service: ServeChat}},
		{name: "other model", fault: func(tbl *Table, b uint64) {
			tbl.SetModels(b, []Model{{ID: "x"}}, 0, t0)
		}, out: true, all: ReasonNoModel},
		{name: "by alias", fault: func(tbl *Table, b uint64) {
			tbl.SetModels(b, []Model{{ID: "x", Aliases: []string{"m"}}}, 0, t0)
		}},
		{name: "context too short", fault: func(tbl *Table, b uint64) {
			tbl.SetModels(b, []Model{{ID: "m", ContextLength: 500}}, 0, t0)
		}, req: Request{PromptTokens: 501}, out: true}, // too long for all: the engine says so in its own words
		{name: "context long enough", fault: func(tbl *Table, b uint64) {
			tbl.SetModels(b, []Model{{ID: "m", ContextLength: 501}}, 0, t0)
		}, req: Request{PromptTokens: 501}},
		{name: "refused a connection", fault: func(tbl *Table, b uint64) {
			tbl.Peer(b).Sent(1, t0)
			tbl.Peer(b).Done(OutcomeRefused, 1, t0)
		}, out: true},
		{name: "busy", fault: func(tbl *Table, b uint64) {
			tbl.Peer(b).Sent(1, t0)
			tbl.Peer(b).Done(OutcomeBusy, 1, t0)
		}, out: true},
	}
	for _, policy := range PolicyNames {
		if policy == "local" {
			continue
		}
		for _, tt := range tests {
			t.Run(policy+"/"+tt.name, func(t *testing.T) {
				tt.req.Model = "m"
				tbl := newFleet(4)
				tt.fault(tbl, 2)
				// The others have much to do, so that 2 is the best but for its fault.
				got := map[uint64]int{}
				p := mustPolicy(t, policy, WithAsk(0))
				rnd := rand.New(rand.NewPCG(1, 2))
				for i := range 400 {
					r := tt.req
					r.Session = uint64(i) + 1
					for _, b := range []uint64{1, 3, 4} {
						other := ready(b, uint32(i+10))
						other.PendingTokens = Some(9000)
						tbl.Update(other, t0)
					}
					d := p.Pick(tbl.Snapshot(), &r, t0, rnd)
					require.NotNil(t, d.Peer)
					got[d.Peer.Boot()]++
				}
				assert.Equal(t, !tt.out, got[2] > 0, "picks: %v", got)

				tbl = newFleet(4)
				for b := range uint64(4) {
					tt.fault(tbl, b+1)
				}
				d := p.Pick(tbl.Snapshot(), &tt.req, t0, rnd)
				if tt.all == ReasonNone {
					assert.NotNil(t, d.Peer)
				} else {
					assert.Nil(t, d.Peer)
					assert.Equal(t, tt.all, d.Reason)
				}
			})
		}
	}
}

func TestReasonsForNone(t *testing.T) {
	for _, policy := range PolicyNames {
		tbl := newFleet(2)
		p := mustPolicy(t, policy)
		rnd := rand.New(rand.NewPCG(1, 2))
		assert.Equal(t, ReasonUnknownModel, p.Pick(tbl.Snapshot(), &Request{Model: "x"}, t0, rnd).Reason, policy)
		tbl.SetMember(Member{Boot: 3}, t0)
		assert.Equal(t, ReasonNoModel, p.Pick(tbl.Snapshot(), &Request{Model: "x"}, t0, rnd).Reason, policy)
		r := Request{Model: "m", Tried: []uint64{1, 2}}
		assert.Equal(t, ReasonAllTried, p.Pick(tbl.Snapshot(), &r, t0, rnd).Reason, policy)
	}
}

func TestLocal(t *testing.T) {
	tbl := newFleet(3)
	r := ready(1, 2)
	r.PendingTokens = Some(1_000_000)
	tbl.Update(r, t0)
	assert.Equal(t, map[uint64]int{1: 50}, pickable(t, "local", tbl, Request{Model: "m"}, t0, 50))
	for _, policy := range PolicyNames {
		assert.Equal(t, map[uint64]int{1: 50}, pickable(t, policy, tbl, Request{Model: "m", Local: true}, t0, 50), policy)
	}
}

func TestStayOrAsk(t *testing.T) {
	tests := []struct {
		name string
		self int // pending tokens of ours, at 10,000/s
		stay bool
	}{
		{"idle like the rest", 0, true},
		{"within 5 ms and the way", 55, true},
		{"more than that", 70, false},
		{"much more", 9000, false},
	}
	for _, n := range []int{4, 16, 40} {
		for _, tt := range tests {
			tbl := newFleet(n)
			r := ready(1, 2)
			r.PendingTokens = Some(tt.self)
			tbl.Update(r, t0)
			d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 100}, t0, rand.New(rand.NewPCG(1, 2)))
			if tt.stay {
				assert.True(t, d.Peer.Self(), "%d members, %s", n, tt.name)
				assert.Zero(t, d.Asks, "%d members, %s", n, tt.name)
				assert.Equal(t, ReasonSelf, d.Reason)
				continue
			}
			want := n
			if n > wholeFleet {
				want = 3
			}
			assert.Contains(t, []int{want, want + 1}, d.Asks, "%d members, %s (ourselves are asked too)", n, tt.name)
			for i := 1; i < d.Asks; i++ {
				assert.GreaterOrEqual(t, d.AskScore[i], d.AskScore[i-1], "best first")
			}
		}
	}
}

func TestUnknownCachesKeepUsFromStaying(t *testing.T) {
	tbl := newFleet(4)
	own := NewDigest(0)
	tbl.SetOwnDigest(own)
	r := Request{Model: "m", PromptTokens: 5000, Prefix: []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}}
	p, rnd := mustPolicy(t, "auto"), rand.New(rand.NewPCG(1, 2))
	d := p.Pick(tbl.Snapshot(), &r, t0, rnd)
	assert.Equal(t, 4, d.Asks, "somebody may have all of it cached: ask")
	own.Touch(r.Prefix, nil)
	d = p.Pick(tbl.Snapshot(), &r, t0, rnd)
	assert.Zero(t, d.Asks, "we have it ourselves")
	assert.Equal(t, 5000-9*512, d.Tokens)
	own.Clear()
	for b := range uint64(4) {
		tbl.SetDigest(b+1, 1, nil, t0)
	}
	d = p.Pick(tbl.Snapshot(), &r, t0, rnd)
	assert.Zero(t, d.Asks, "fresh digests say that nobody has it")
	d = p.Pick(tbl.Snapshot(), &r, t0.Add(2900*time.Millisecond), rnd)
	assert.Zero(t, d.Asks)
}

func TestOldVersionsAreNotAsked(t *testing.T) {
	tbl := newFleet(3)
	tbl.SetMember(Member{Boot: 2, Version: 0}, t0)
	r := ready(1, 2)
	r.PendingTokens = Some(9000)
	tbl.Update(r, t0)
	p, rnd := mustPolicy(t, "auto"), rand.New(rand.NewPCG(1, 2))
	d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 10}, t0, rnd)
	require.Equal(t, 2, d.Asks)
	for _, x := range d.Asked() {
		assert.NotEqual(t, uint64(2), x.Boot())
	}
	tbl.SetMember(Member{Boot: 3, Version: 0}, t0)
	d = p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 10}, t0, rnd)
	assert.Zero(t, d.Asks, "nobody but ourselves to ask")
	assert.NotNil(t, d.Peer)
}

func TestSettle(t *testing.T) {
	tbl := newFleet(4)
	r := ready(1, 2)
	r.PendingTokens = Some(9000) // 0.9 s
	tbl.Update(r, t0)
	d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 1000}, t0, rand.New(rand.NewPCG(1, 2)))
	require.Equal(t, 4, d.Asks)
	index := func(boot uint64) int {
		for i, p := range d.Asked() {
			if p.Boot() == boot {
				return i
			}
		}
		t.Fatalf("%d was not asked", boot)
		return 0
	}
	ans := func(boot uint64, score float64) Answer {
		return Answer{Index: index(boot), Score: score, Tokens: 77, OK: true}
	}
	refuse := func(boot uint64) Answer { return Answer{Index: index(boot)} }
	tests := []struct {
		name    string
		answers []Answer
		want    uint64 // 0 = the first choice
		reason  Reason
	}{
		{"no answer: what gossip said", nil, d.Peer.Boot(), d.Reason},
		{"the lowest wins", []Answer{ans(1, 0.9), ans(2, 0.5), ans(3, 0.3), ans(4, 0.4)}, 3, ReasonAsked},
		{"the way to another counts", []Answer{ans(1, 0.3), ans(2, 0.2995), ans(3, 0.9), ans(4, 0.9)}, 1, ReasonAsked},
		{"who refuses is out", []Answer{ans(1, 0.9), refuse(2), ans(3, 0.5), refuse(4)}, 3, ReasonAsked},
		{"silence costs 10 ms on top of gossip (0.101 s)", []Answer{ans(1, 0.9), ans(2, 0.12), ans(3, 0.13)}, 4, ReasonBest},
		{"but not more", []Answer{ans(1, 0.9), ans(2, 0.105), ans(3, 0.13)}, 2, ReasonAsked},
		{"all refuse", []Answer{refuse(1), refuse(2), refuse(3), refuse(4)}, 0, ReasonAllFull},
	}
	for _, tt := range tests {
		got := Settle(&d, tt.answers)
		assert.Zero(t, got.Asks, tt.name)
		assert.Equal(t, tt.reason, got.Reason, tt.name)
		if tt.want == 0 {
			assert.Nil(t, got.Peer, tt.name)
			continue
		}
		require.NotNil(t, got.Peer, tt.name)
		assert.Equal(t, tt.want, got.Peer.Boot(), tt.name)
		if tt.reason == ReasonAsked {
			assert.Equal(t, 77, got.Tokens)
		}
	}
	got := Settle(&d, []Answer{ans(3, 0.2), ans(4, 0.1), ans(2, 0.15), ans(1, 0.7)})
	assert.Equal(t, uint64(2), got.RunnerUp.Boot())
	assert.InDelta(t, 0.151, got.RunnerUpScore, 1e-9)
}

// TestSettleKeepsWhatOnlyWeKnow: a replica that just failed us answers that it is idle.
func TestSettleKeepsWhatOnlyWeKnow(t *testing.T) {
	tbl := newFleet(3)
	r := ready(1, 2)
	r.PendingTokens = Some(9000)
	tbl.Update(r, t0)
	p := tbl.Peer(2)
	p.Sent(1, t0)
	p.Done(OutcomeServerError, 1, t0)
	d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 1000}, t0, rand.New(rand.NewPCG(1, 2)))
	require.Equal(t, 3, d.Asks)
	var answers []Answer
	for i, x := range d.Asked() {
		score := map[uint64]float64{1: 1, 2: 0.001, 3: 0.8}[x.Boot()]
		answers = append(answers, Answer{Index: i, Score: score, OK: true})
	}
	assert.Equal(t, uint64(3), Settle(&d, answers).Peer.Boot())
}

// obvious is the twin of p2c and of auto's comparison: the score written down once more, from the report alone.
func obvious(r Report, in int, self bool) float64 {
	rate := r.PrefillRate.V
	s := (float64(r.PendingTokens.V) + float64(r.HeldTokens.V) + float64(in)) / rate
	s += float64(in) / rate * (0.05*math.Min(float64(r.Running.V), 32) + 0.1*float64(r.Waiting.V+r.Held.V))
	s += 0.5 * (r.KVUsed.V + float64(r.PendingTokens.V+r.HeldTokens.V)/float64(r.KVCapacity.V))
	s += 0.5 * math.Max(0, (float64(r.Running.V+r.Waiting.V+r.Held.V)+1-0.9*float64(r.RunLimit.V))/(0.1*float64(r.RunLimit.V)))
	if !self {
		s += 0.001
	}
	return s
}

func TestTwin(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	for range 2000 {
		n := 2 + rnd.IntN(15)
		tbl := newFleet(n)
		reports := map[uint64]Report{}
		for b := range uint64(n) {
			r := busy(b+1, 2, rnd)
			r.Held, r.HeldTokens = Some(rnd.IntN(3)), Some(rnd.IntN(500))
			r.RunLimit = Some(1 + rnd.IntN(60))
			reports[b+1] = r
			tbl.Update(r, t0)
		}
		req := Request{Model: "m", PromptTokens: rnd.IntN(20_000)}
		best, low := uint64(0), math.Inf(1)
		for b, r := range reports {
			if s := obvious(r, req.PromptTokens, b == 1); s < low {
				best, low = b, s
			}
		}
		d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &req, t0, rnd)
		if self := obvious(reports[1], req.PromptTokens, true); self <= low+stay {
			require.Equal(t, uint64(1), d.Peer.Boot(), "stays")
			require.InDelta(t, self, d.Score, 1e-9)
		} else {
			require.Equal(t, best, d.Ask[0].Boot(), "the best is asked first")
			require.InDelta(t, low, d.AskScore[0], 1e-9)
		}
		d = mustPolicy(t, "p2c").Pick(tbl.Snapshot(), &req, t0, rnd)
		require.NotNil(t, d.RunnerUp)
		require.NotEqual(t, d.Peer, d.RunnerUp, "two distinct")
		mine := obvious(reports[d.Peer.Boot()], req.PromptTokens, d.Peer.Self())
		other := obvious(reports[d.RunnerUp.Boot()], req.PromptTokens, d.RunnerUp.Self())
		require.LessOrEqual(t, mine, other)
		require.InDelta(t, mine, d.Score, 1e-9)
	}
}

// TestShares compares 100,000 picks with what theory expects.
func TestShares(t *testing.T) {
	const n, picks = 10, 100_000
	shares := func(policy string, tbl *Table, r Request) map[uint64]float64 {
		out := map[uint64]float64{}
		for b, k := range pickable(t, policy, tbl, r, t0, picks) {
			out[b] = float64(k) / picks
		}
		return out
	}
	within := func(t *testing.T, want, got float64, what any) {
		// five standard deviations of a binomial share
		assert.InDelta(t, want, got, 5*math.Sqrt(want*(1-want)/picks)+1e-9, "%v", what)
	}
	t.Run("random is uniform", func(t *testing.T) {
		got := shares("random", newFleet(n), Request{Model: "m"})
		for b := range uint64(n) {
			within(t, 0.1, got[b+1], b+1)
		}
	})
	t.Run("p2c: rank k of n wins 2(n-k)/(n(n-1))", func(t *testing.T) {
		tbl := newFleet(n)
		for b := range uint64(n) {
			r := ready(b+1, 2)
			r.PendingTokens = Some(int(b) * 1000)
			tbl.Update(r, t0)
		}
		got := shares("p2c", tbl, Request{Model: "m"})
		for k := range n {
			within(t, 2*float64(n-1-k)/(n*(n-1)), got[uint64(k+1)], k)
		}
	})
	t.Run("p2c: ties at random", func(t *testing.T) {
		tbl := newFleet(n)
		tbl.Peer(1).self = false // its way costs as much as the others'
		got := shares("p2c", tbl, Request{Model: "m"})
		for b := range uint64(n) {
			within(t, 0.1, got[b+1], b+1)
		}
	})
	for _, policy := range []string{"least_requests", "least_tokens"} {
		t.Run(policy+": ties at random", func(t *testing.T) {
			tbl := newFleet(n)
			for b := uint64(1); b <= 6; b++ {
				r := ready(b, 2)
				r.Running = Some(3)
				tbl.Update(r, t0)
			}
			got := shares(policy, tbl, Request{Model: "m"})
			for b := uint64(7); b <= n; b++ {
				within(t, 0.25, got[b], b)
			}
		})
	}
	t.Run("weighted round robin follows the weights", func(t *testing.T) {
		tbl := newFleet(3)
		for b, w := range map[uint64]float64{1: 5, 2: 1, 3: 2} {
			r := ready(b, 2)
			r.Weight = Some(w)
			tbl.Update(r, t0)
		}
		got := shares("weighted_round_robin", tbl, Request{Model: "m"})
		assert.InDelta(t, 5./8, got[1], 1e-4)
		assert.InDelta(t, 1./8, got[2], 1e-4)
		assert.InDelta(t, 2./8, got[3], 1e-4)
	})
	t.Run("auto in a large fleet draws all of it", func(t *testing.T) {
		tbl := newFleet(100)
		r := ready(1, 2)
		r.PendingTokens = Some(90_000)
		tbl.Update(r, t0)
		got := shares("auto", tbl, Request{Model: "m", PromptTokens: 100})
		for b := uint64(2); b <= 100; b++ {
			within(t, 1./99, got[b], b)
		}
	})
}

func TestPicksAllocateNothing(t *testing.T) {
	for _, n := range []int{3, 16, 300} {
		tbl := bigTable(n)
		own := NewDigest(0)
		tbl.SetOwnDigest(own)
		r := Request{Model: "alias", Service: ServeChat, PromptTokens: 3000, Prefix: []uint64{1, 2, 3, 4}, Session: 9}
		tbl.SetDigest(2, 1, []uint32{1, 2, 3}, t0)
		s, rnd := tbl.Snapshot(), rand.New(rand.NewPCG(1, 2))
		for _, name := range PolicyNames {
			p := mustPolicy(t, name)
			p.Pick(s, &r, t0, rnd)
			answers := make([]Answer, 0, MaxAsk)
			assert.Zero(t, testing.AllocsPerRun(200, func() {
				d := p.Pick(s, &r, t0, rnd)
				answers = answers[:0]
				for i := range d.Asks {
					answers = append(answers, Answer{Index: i, Score: 1, OK: true})
				}
				d = Settle(&d, answers)
				d.Peer.Sent(d.Tokens, t0)
				d.Peer.FirstToken(d.Tokens, t0)
				d.Peer.Observe(time.Second, time.Second, t0)
				d.Peer.Done(OutcomeOK, 0, t0)
			}), "%s among %d", name, n)
		}
		assert.Zero(t, testing.AllocsPerRun(200, func() { tbl.Answer(&r, t0) }))
	}
}
