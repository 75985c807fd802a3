package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// asked returns a decision that asks all n members, and all answers alike.
func asked(t *testing.T, tbl *Table, r Request, now time.Time, seed uint64, score float64) (Decision, []Answer) {
	t.Helper()
	d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &r, now, newRand(seed))
	require.Equal(t, len(tbl.Snapshot().Peers()), d.Asks)
	var answers []Answer
	for i := range d.Asks {
		answers = append(answers, Answer{Index: i, Score: score, Tokens: r.PromptTokens, OK: true})
	}
	return d, answers
}

func loaded(n int) *Table {
	tbl := newFleet(n)
	r := ready(1, 2)
	r.PendingTokens = Some(90_000)
	tbl.Update(r, t0)
	return tbl
}

// TestSettleOwnSendsUnderWay: what we sent a moment ago cannot be in the answer, so it is added.
func TestSettleOwnSendsUnderWay(t *testing.T) {
	tbl := loaded(3)
	now := t0.Add(time.Second)
	tbl.Peer(2).Sent(3000, now.Add(-2*time.Millisecond)) // more than one and a half round trips ago: counted there
	tbl.Peer(3).Sent(300, now.Add(-time.Millisecond))
	d, answers := asked(t, tbl, Request{Model: "m", PromptTokens: 1000}, now, 1, 0.5)
	for i, p := range d.Asked() {
		if p.Self() {
			answers[i].Score = 0.502
		}
	}
	got := Settle(&d, answers)
	assert.Equal(t, uint64(2), got.Peer.Boot())
	assert.InDelta(t, 0.501, got.Score, 1e-9)
	tbl.Peer(2).Sent(3000, now.Add(time.Millisecond)) // by another request, between question and answer
	got = Settle(&d, answers)
	assert.Equal(t, uint64(1), got.Peer.Boot())
	assert.Equal(t, uint64(3), got.RunnerUp.Boot())
	assert.InDelta(t, 0.501+0.03+0.01, got.RunnerUpScore, 1e-9, "300 tokens in front of us, one request harmed")
}

// TestSettleSpreadsCollidingAskers: many agents ask at the same moment and hear the same answers.
func TestSettleSpreadsCollidingAskers(t *testing.T) {
	count := map[uint64]int{}
	const askers = 200
	for seed := range uint64(askers) {
		d, answers := asked(t, loaded(16), Request{Model: "m", PromptTokens: 1000}, t0, seed, 0)
		for i, p := range d.Asked() {
			answers[i].Score = 0.1 + 0.001*float64(p.Boot())
			if p.Self() {
				answers[i].Score = 9
			}
		}
		count[Settle(&d, answers).Peer.Boot()]++
	}
	assert.Less(t, count[2], askers/2, "the lowest of all does not get all: %v", count)
	assert.Greater(t, count[2], askers/4, "but most: %v", count)
	for b, n := range count {
		assert.LessOrEqual(t, b, uint64(12), "%d got %d: the worst ones none", b, n)
	}
}

// TestSettleCachedAreAlwaysConsidered: the draw is among those that differ in load alone.
func TestSettleCachedAreAlwaysConsidered(t *testing.T) {
	for seed := range uint64(100) {
		d, answers := asked(t, loaded(16), Request{Model: "m", PromptTokens: 5000}, t0, seed, 0.5)
		for i, p := range d.Asked() {
			if p.Boot() == 9 {
				answers[i].Score, answers[i].Tokens = 0.1, 392
			}
		}
		require.Equal(t, uint64(9), Settle(&d, answers).Peer.Boot())
	}
}

func TestSettleLooksAtAllIfTheDrawnRefuse(t *testing.T) {
	for seed := range uint64(50) {
		d, answers := asked(t, loaded(16), Request{Model: "m", PromptTokens: 5000}, t0, seed, 0.5)
		for i := range answers {
			answers[i].OK = d.Ask[i].Boot() == 7
		}
		got := Settle(&d, answers)
		require.NotNil(t, got.Peer)
		require.Equal(t, uint64(7), got.Peer.Boot())
	}
}
