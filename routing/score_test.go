package routing

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestScoreTerms(t *testing.T) {
	base := load{rate: 10_000}
	with := func(f func(*load)) load { l := base; f(&l); return l }
	tests := []struct {
		name string
		load load
		u    float64
		want Terms
	}{
		{"idle: only our own prefill, tokens / (tokens/s)", base, 5000, Terms{Prefill: 0.5}},
		{"queue: pending tokens / rate", with(func(l *load) { l.queue = 20_000 }), 5000, Terms{Queue: 2, Prefill: 0.5}},
		{"harm: 5 % of our prefill per running request", with(func(l *load) { l.running = 10 }), 5000, Terms{Prefill: 0.5, Harm: 0.25}},
		{"harm is capped at 32 running", with(func(l *load) { l.running = 200 }), 5000, Terms{Prefill: 0.5, Harm: 0.8}},
		{"harm: 10 % per waiting request, not capped", with(func(l *load) { l.waiting = 40 }), 5000, Terms{Prefill: 0.5, Harm: 2}},
		{"no harm without uncached tokens", with(func(l *load) { l.running, l.waiting = 10, 10 }), 0, Terms{}},
		{"KV: half a second at full cache", with(func(l *load) { l.kv = 0.8 }), 0, Terms{KV: 0.4}},
		{"KV: pending prompts will take their space", with(func(l *load) { l.kv, l.kvCap, l.queue = 0.5, 100_000, 20_000 }), 0, Terms{Queue: 2, KV: 0.35}},
		{"limit: nothing below 90 %", with(func(l *load) { l.limit, l.running = 100, 89 }), 0, Terms{}},
		{"limit: half a second when we are the last that fits", with(func(l *load) { l.limit, l.running, l.waiting = 100, 90, 9 }), 0, Terms{Limit: 0.5}},
		{"limit: grows beyond", with(func(l *load) { l.limit, l.running = 100, 119 }), 0, Terms{Limit: 1.5}},
		{"limit unknown", with(func(l *load) { l.running = 1000 }), 0, Terms{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.load.terms(tt.u)
			tt.want.Slowness, tt.want.SlowStart = 1, 1
			assert.InDelta(t, tt.want.Queue, got.Queue, 1e-9, "queue")
			assert.InDelta(t, tt.want.Prefill, got.Prefill, 1e-9, "prefill")
			assert.InDelta(t, tt.want.Harm, got.Harm, 1e-9, "harm")
			assert.InDelta(t, tt.want.KV, got.KV, 1e-9, "kv")
			assert.InDelta(t, tt.want.Limit, got.Limit, 1e-9, "limit")
			sum := got.Queue + got.Prefill + got.Harm + got.KV + got.Limit
			assert.InDelta(t, sum, got.Total(), 1e-9, "total")
			cost, first := tt.load.cost(tt.u)
			assert.InDelta(t, sum, cost, 1e-9, "cost")
			assert.InDelta(t, got.Queue+got.Prefill, first, 1e-9, "first token")
		})
	}
}

func TestScoreTotal(t *testing.T) {
	tests := []struct {
		name  string
		terms Terms
		want  float64
	}{
		{"sum of the load's terms", Terms{Queue: 1, Prefill: 2, Harm: 3, KV: 4, Limit: 5, Slowness: 1, SlowStart: 1}, 15},
		{"slow start divides", Terms{Prefill: 0.2, Slowness: 1, SlowStart: 0.1}, 2},
		{"slowness multiplies", Terms{Prefill: 0.2, Slowness: 3, SlowStart: 1}, 0.6},
		{"the way and the penalty are added as they are", Terms{RoundTrip: 0.001, Penalty: 5, Slowness: 3, SlowStart: 0.1}, 5.001},
	}
	for _, tt := range tests {
		assert.InDelta(t, tt.want, tt.terms.Total(), 1e-9, tt.name)
	}
}

func TestUncached(t *testing.T) {
	tests := []struct{ prompt, blocks, want int }{
		{1000, 0, 1000},
		{1000, 1, 488},
		{1000, 2, 1}, // the last token is always computed
		{1000, 9, 1},
		{0, 3, 0},
	}
	for _, tt := range tests {
		assert.InDelta(t, tt.want, uncached(&Request{PromptTokens: tt.prompt}, tt.blocks), 0, "%+v", tt)
	}
}

func TestRoundTripAndZone(t *testing.T) {
	tbl := NewTable(Member{Boot: 1, Zone: "a"})
	now := time.Unix(100, 0)
	tbl.SetMember(Member{Boot: 2, Zone: "a"}, now)
	tbl.SetMember(Member{Boot: 3, Zone: "b"}, now)
	tbl.SetMember(Member{Boot: 4}, now)
	for boot, want := range map[uint64]float64{1: 0, 2: 0.001, 3: 0.006, 4: 0.001} {
		assert.InDelta(t, want, tbl.Peer(boot).roundTrip(), 1e-9, "boot %d, unmeasured", boot)
	}
	tbl.Peer(3).SetRTT(2 * time.Millisecond)
	assert.InDelta(t, 0.007, tbl.Peer(3).roundTrip(), 1e-9, "measured, other zone")
}

func TestUnknownRateIsTheMedianOfTheFleet(t *testing.T) {
	now := time.Unix(100, 0)
	tbl := NewTable(Member{Boot: 1})
	assert.InDelta(t, 2000, tbl.Rate(), 0, "nobody has measured")
	for i, rate := range []float64{100, 9000, 300} {
		boot := uint64(i + 2)
		tbl.SetMember(Member{Boot: boot}, now)
		now = now.Add(2 * time.Second) // medians are taken once a second
		tbl.Update(Report{Boot: boot, Seq: 1, PrefillRate: Some(rate)}, now)
	}
	tbl.SetMember(Member{Boot: 9}, now)
	tbl.Update(Report{Boot: 9, Seq: 1}, now)
	p := tbl.Peer(9)
	assert.InDelta(t, 300, p.load(p.view.Load(), tbl.Snapshot()).rate, 0)
}

func TestUnknownTokensAreNotZero(t *testing.T) {
	v := newView(Report{Waiting: Some(2), Held: Some(1)}, time.Unix(1, 0), start)
	assert.InDelta(t, 3*defaultPrompt, v.base.queue, 0)
	v = newView(Report{Waiting: Some(2), Held: Some(1), PendingTokens: Some(700), HeldTokens: Some(11)}, time.Unix(1, 0), start)
	assert.InDelta(t, 711, v.base.queue, 0)
}

// TestExplainAgreesWithPick: people are told the same numbers that picks use.
func TestExplainAgreesWithPick(t *testing.T) {
	rnd := newRand(5)
	for range 300 {
		tbl := newFleet(8)
		for b := range uint64(8) {
			r := busy(b+1, 2, rnd)
			r.ReadyFor = Some(time.Duration(rnd.IntN(60)) * time.Second)
			tbl.Update(r, t0)
		}
		end(tbl.Peer(3), OutcomeServerError, t0)
		tbl.Peer(4).slowness.Store(math.Float64bits(2.5))
		r := Request{Model: "m", PromptTokens: rnd.IntN(9000)}
		d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &r, t0, rnd)
		score := map[*Peer]float64{d.Peer: d.Score}
		for i, p := range d.Asked() {
			score[p] = d.AskScore[i]
		}
		for _, c := range tbl.Snapshot().Explain(&r, t0) {
			if want, ok := score[c.Peer]; ok {
				assert.InDelta(t, want, c.Score, 1e-9)
			}
		}
	}
}
