package sim

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestQueueOrder(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	var q queue
	var want []int64
	popped := 0
	for range 5000 {
		if rnd.IntN(3) > 0 || len(q.heap) == 0 {
			at := rnd.Int64N(200)
			q.push(event{at: at, a: int32(len(want))})
			want = append(want, at)
			continue
		}
		e := q.pop()
		popped++
		for i := range q.heap {
			require.True(t, before(&e, &q.heap[i]))
		}
	}
	var last event
	for len(q.heap) > 0 {
		e := q.pop()
		popped++
		require.True(t, last.at < e.at || last.at == e.at && last.seq < e.seq, "same times in the order of making")
		last = e
	}
	assert.Len(t, want, popped)
}

func TestAlarms(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	a := newAlarms(13)
	at := make([]int64, 13)
	for i := range at {
		at[i] = never
	}
	for range 5000 {
		i := rnd.IntN(13)
		at[i] = rnd.Int64N(100)
		a.set(int32(i), at[i])
		_, got := a.first()
		require.Equal(t, slices.Min(at), got)
	}
}
