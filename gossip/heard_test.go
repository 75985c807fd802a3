package gossip

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestHeardOrder(t *testing.T) {
	now := time.Unix(1000, 0)
	h := newHeard(time.Second)
	h.join(1, now)
	var applied []uint32
	for _, seq := range []uint32{5, 3, 4, 6, 6} {
		if h.take(&routing.Report{Boot: 1, Seq: seq}, now) == verdictNew {
			applied = append(applied, seq)
		}
	}
	assert.Equal(t, []uint32{5, 6}, applied)

	h.join(2, now)
	assert.Equal(t, verdictNew, h.take(&routing.Report{Boot: 2, Seq: math.MaxUint32}, now))
	assert.Equal(t, verdictNew, h.take(&routing.Report{Boot: 2, Seq: 0}, now), "sequences wrap")
	assert.Equal(t, verdictOld, h.take(&routing.Report{Boot: 2, Seq: math.MaxUint32}, now))
}

func TestHeardParks(t *testing.T) {
	now := time.Unix(1000, 0)
	h := newHeard(time.Second)
	for i := range 10_000 {
		h.take(&routing.Report{Boot: uint64(i + 1), Seq: 1}, now)
	}
	assert.Equal(t, maxParked, h.numParked())
	assert.Equal(t, verdictFull, h.take(&routing.Report{Boot: 99_999, Seq: 1}, now))
	assert.Equal(t, verdictOld, h.take(&routing.Report{Boot: 1, Seq: 1}, now))
	assert.Equal(t, verdictParked, h.take(&routing.Report{Boot: 1, Seq: 2}, now))
	assert.Equal(t, maxParked, h.doubts(0, now))
	assert.Zero(t, h.doubts(time.Second, now))

	r, ok := h.join(1, now.Add(time.Second))
	assert.True(t, ok)
	assert.Equal(t, routing.Report{Boot: 1, Seq: 2, Age: time.Second}, r)
	_, ok = h.join(2, now.Add(6*time.Second))
	assert.False(t, ok, "too old to be told")

	assert.Equal(t, verdictParked, h.take(&routing.Report{Boot: 99_997, Seq: 1}, now.Add(6*time.Second)))
	assert.Equal(t, verdictParked, h.take(&routing.Report{Boot: 99_998, Seq: 1}, now.Add(6*time.Second)))
	assert.Equal(t, maxParked, h.numParked())
	assert.Equal(t, verdictParked, h.take(&routing.Report{Boot: 99_999, Seq: 1}, now.Add(6*time.Second)), "the old ones make room")
	assert.Equal(t, 3, h.numParked())
}

func TestHeardFailedMember(t *testing.T) {
	now := time.Unix(1000, 0)
	h := newHeard(time.Second)
	h.join(1, now)
	h.take(&routing.Report{Boot: 1, Seq: 7}, now)
	h.part(1)
	assert.Equal(t, verdictOld, h.take(&routing.Report{Boot: 1, Seq: 6}, now))
	assert.Equal(t, verdictParked, h.take(&routing.Report{Boot: 1, Seq: 8}, now))
	r, ok := h.join(1, now)
	assert.True(t, ok)
	assert.Equal(t, uint32(8), r.Seq)
	h.part(1)
	h.forget(1)
	assert.Empty(t, h.voices)
}

func TestHeardSilent(t *testing.T) {
	now := time.Unix(1000, 0)
	h := newHeard(time.Second)
	h.join(1, now) // never says anything
	h.join(2, now) // slow heartbeat
	h.join(3, now) // says goodbye
	h.take(&routing.Report{Boot: 2, Seq: 1, Heartbeat: 5 * time.Second}, now)
	h.take(&routing.Report{Boot: 3, Seq: 1, Goodbye: true}, now)
	assert.Empty(t, h.silent(now.Add(3*time.Second)))
	assert.Zero(t, h.doubts(time.Second, now.Add(2*time.Second)))
	assert.Equal(t, 1, h.doubts(time.Second, now.Add(3*time.Second)), "said goodbye and is still a member")
	assert.Equal(t, []uint64{1}, h.silent(now.Add(4*time.Second)))
	assert.ElementsMatch(t, []uint64{1, 2}, h.silent(now.Add(16*time.Second)))
	h.part(1)
	assert.Equal(t, []uint64{2}, h.silent(now.Add(16*time.Second)))
}
