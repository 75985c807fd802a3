package routing

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestWorthMoving(t *testing.T) {
	thief := Thief{Rate: 10_000, RoundTrip: time.Millisecond}
	held := Held{Before: 2000, Here: 1000, There: 1000, Rate: 10_000} // 300 ms here, 100 ms there
	assert.True(t, thief.WorthMoving(held))
	busy := thief
	busy.Pending = 1700 // 1.1·(270 + 1) + 5 > 300
	assert.False(t, busy.WorthMoving(held))
	near := held
	near.Before = 160 // 116 ms here against 1.1·101 + 5 = 116.1
	assert.False(t, thief.WorthMoving(near))
	near.Before = 170
	assert.True(t, thief.WorthMoving(near))
	cached := held
	cached.Here = 100 // 210 ms here; there 900 tokens of prefix would be lost: + 270 ms
	assert.False(t, thief.WorthMoving(cached))
	cached.Before = 5000
	assert.True(t, thief.WorthMoving(cached))
	decoding := thief
	decoding.Running = 20 // … the loss counts double
	assert.False(t, decoding.WorthMoving(cached))
	near.Before, near.FullKV = 0, true
	assert.True(t, thief.WorthMoving(near), "no room here")
	assert.False(t, (&Thief{}).WorthMoving(held), "unknown rate")
}

func TestVictim(t *testing.T) {
	table := NewTable(Member{Boot: 1})
	now := time.Unix(1000, 0)
	rnd := rand.New(rand.NewPCG(1, 2))
	assert.Nil(t, table.Snapshot().Victim(now, rnd))
	for boot := uint64(2); boot <= 5; boot++ {
		table.SetMember(Member{Boot: boot, Version: AskVersion}, now)
		table.Update(Report{Boot: boot, State: StateReady, Held: Some(0), HeldTokens: Some(0)}, now)
	}
	assert.Nil(t, table.Snapshot().Victim(now, rnd), "nobody holds any: an idle fleet sends no steal messages")
	table.Update(Report{Boot: 3, Seq: 1, State: StateReady, Held: Some(1), HeldTokens: Some(500)}, now)
	table.Update(Report{Boot: 4, Seq: 1, State: StateReady, Held: Some(2), HeldTokens: Some(900)}, now)
	n := map[uint64]int{}
	for range 3000 {
		n[table.Snapshot().Victim(now, rnd).Boot()]++
	}
	assert.InDelta(t, 2500, n[4], 100, "two thirds, and half of the last third")
	assert.InDelta(t, 500, n[3], 100)
	assert.Nil(t, table.Snapshot().Victim(now.Add(time.Minute), rnd), "old records say nothing")
}

func TestUncachedAtPeer(t *testing.T) {
	table := NewTable(Member{Boot: 1})
	now := time.Unix(1000, 0)
	table.SetMember(Member{Boot: 2}, now)
	r := &Request{PromptTokens: 1500, Prefix: []uint64{11, 12, 13}}
	assert.Equal(t, 1500, table.Uncached(table.Peer(2), r, now))
	table.SetDigest(2, 1, []uint32{11, 12}, now)
	assert.Equal(t, 1500-1024, table.Uncached(table.Peer(2), r, now))
	d := NewDigest(0)
	d.Touch([]uint64{11, 12, 13}, nil)
	table.SetOwnDigest(d)
	assert.Equal(t, 1, table.Uncached(table.Self(), r, now), "the last token is always computed")
	assert.Equal(t, 1500, table.Uncached(table.Peer(2), &Request{PromptTokens: 1500}, now))
}
