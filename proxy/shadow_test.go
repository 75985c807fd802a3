package proxy

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/routing"
)

// TestShadowQueueDrains: a correction lives exactly as long as one of the two queues has work that the other has not.
func TestShadowQueueDrains(t *testing.T) {
	t0 := time.Unix(1, 0)
	for _, row := range []struct {
		name              string
		delta, real, rate float64
		after             time.Duration
		want              float64
	}{
		{"both have work", 500, 900, 1000, 200 * time.Millisecond, 500},
		{"only the queue that would be", 500, 0, 1000, 200 * time.Millisecond, 300},
		{"that one is done", 500, 0, 1000, time.Second, 0},
		{"only the real one", -500, 500, 1000, 200 * time.Millisecond, -300},
		{"the real one shrank below", -500, 100, 1000, 0, -100},
		{"both, less there", -500, 900, 1000, time.Second, -500},
		{"none", 0, 0, 1000, time.Second, 0},
	} {
		q := shadowQueue{delta: row.delta, at: t0}
		q.drain(row.real, row.rate, t0.Add(row.after))
		assert.InDelta(t, row.want, q.delta, 1e-6, row.name)
	}
}

// TestShadowNote: a queue here and none there would move requests until what moved has made both equally long.
func TestShadowNote(t *testing.T) {
	t0 := time.Unix(1, 0)
	tbl := routing.NewTable(routing.Member{Boot: 1, Node: "a", Self: true})
	tbl.SetMember(routing.Member{Boot: 2, Node: "b", Addr: "b:1"}, t0)
	for boot, pending := range map[uint64]int{1: 6000, 2: 0} {
		tbl.SetModels(boot, []routing.Model{{ID: "m"}}, 0, t0)
		tbl.Update(routing.Report{Boot: boot, Seq: 1, State: routing.StateReady, Heartbeat: time.Second, Running: routing.Some(1), PendingTokens: routing.Some(pending),
			PrefillRate: routing.Some(2000.0), ReadyFor: routing.Some(time.Hour)}, t0)
	}
	pol, err := routing.NewPolicy("auto")
	assert.NoError(t, err)
	s := &shadow{}
	r := &routing.Request{Model: "m", PromptTokens: 1000, Class: 2}
	var to []string
	for range 4 {
		d := pol.Pick(tbl.Snapshot(), r, t0, rand.New(rand.NewPCG(1, 1)))
		p, n := s.note(tbl.Snapshot(), r, d, true, t0)
		to = append(to, p.Member().Node)
		assert.InDelta(t, 3.5, n.here, 0.01, "the real queue does not change")
	}
	assert.Equal(t, []string{"b", "b", "b", "a"}, to)
	_, n := s.note(tbl.Snapshot(), r, routing.Decision{}, true, t0)
	assert.Greater(t, n.there, 1.4, "what moved waits there, and is missing here")
	assert.Less(t, n.there, 2.6)
	assert.Equal(t, uint64(5), s.picks)
}
