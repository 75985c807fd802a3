package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A digest that does not change is trusted for as long as records say that it does not.
func TestRecordsConfirmTheDigest(t *testing.T) {
	now := time.Now()
	tab := NewTable(Member{Boot: 1})
	tab.SetMember(Member{Boot: 2}, now)
	p := tab.Peer(2)
	sure := func() bool {
		_, sure := tab.cached(p, []uint64{7}, &cachedBlocks{}, tab.clock.tick(now))
		return sure
	}
	seq := uint32(0)
	say := func(prefix Opt[uint32]) {
		seq++
		tab.Update(Report{Boot: 2, Seq: seq, PrefixSeq: prefix}, now)
	}
	say(Opt[uint32]{})
	assert.False(t, sure(), "it does not say")
	say(Some[uint32](0))
	assert.True(t, sure(), "nothing is cached there")
	assert.True(t, tab.ApplyDelta(Delta{Boot: 2, Seq: 1, Added: []uint32{7}}, now))
	assert.True(t, sure())
	now = now.Add(11 * time.Second)
	assert.False(t, sure(), "silence")
	say(Some[uint32](1))
	assert.True(t, sure(), "unchanged")
	now = now.Add(11 * time.Second)
	say(Some[uint32](2))
	assert.False(t, sure(), "we miss a delta")
}
