package routing

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func chain(session uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = mix(session<<20+uint64(i)) &^ FineBlock
	}
	return out
}

func TestDigestIsAnLRUOfWholeChains(t *testing.T) {
	d := NewDigest(10 * PrefixBlockTokens)
	a, b := chain(1, 6), chain(2, 3)
	d.Touch(a, nil)
	d.Touch(b, nil)
	assert.Equal(t, 6, d.Match(a))
	assert.Equal(t, 3, d.Match(b))
	assert.Zero(t, d.Match(chain(3, 2)))
	d.Touch(chain(3, 4), nil) // 13 blocks for 10 places: the deepest of the oldest chain go
	assert.Equal(t, 3, d.Match(a))
	assert.Equal(t, 3, d.Match(b))
	d.Touch(a[:1], nil)
	d.Touch(chain(4, 3), nil) // two of a are left that were not used again, then b's deepest
	assert.Equal(t, 1, d.Match(a))
	assert.Equal(t, 2, d.Match(b))
	assert.Equal(t, 10, d.Len())
	d.Clear()
	assert.Zero(t, d.Len())
	assert.Zero(t, d.Match(a))
}

func TestDigestSize(t *testing.T) {
	assert.Equal(t, 430_000, NewDigest(430_000).capacity)
	assert.Equal(t, 430_000, NewDigest(0).capacity, "unknown")
	d := NewDigest(0)
	d.Touch(chain(1, 500), nil)
	d.Resize(100 * PrefixBlockTokens)
	assert.Equal(t, 100, d.Match(chain(1, 500)))
}

// What waits for the engine counts as cached for those who come after it, for as long as it waits, and is nothing that
// peers are told.
func TestDigestExpectsWhatWaits(t *testing.T) {
	d := NewDigest(0)
	a, b := chain(1, 6), chain(1, 6)
	b[4], b[5] = 77, 78 // another turn of the same talk
	d.Touch(a[:1], nil)
	d.Expect(a)
	d.Expect(b[:5])
	assert.Equal(t, 6, d.Match(a))
	assert.Equal(t, 5, d.Match(b))
	d.Forgo(a) // it was given away
	assert.Equal(t, 4, d.Match(a), "what both have is still expected")
	d.Forgo(b[:5])
	assert.Equal(t, 1, d.Match(a))
	assert.Empty(t, d.expected)
	assert.Equal(t, 1, d.Len())
}

func TestDigestIsCorrectedByTheEngine(t *testing.T) {
	d := NewDigest(1000 * PrefixBlockTokens)
	d.Touch(chain(1, 1000), nil)
	d.Correct(50_000, 50_000-100)
	assert.Equal(t, 1000, d.Len(), "less than a block apart: right")
	d.Correct(50_000, 10_000)
	assert.Equal(t, 997, d.Len())
	d.Resize(1000 * PrefixBlockTokens)
	assert.Equal(t, 997, d.Len(), "the next reading of the engine's pages says the same size")
	for range 600 {
		d.Correct(50_000, 0)
	}
	assert.Equal(t, 16, d.Len(), "never to nothing")
	for range 1000 {
		d.Correct(512, 512)
	}
	assert.Equal(t, 1000*PrefixBlockTokens, d.capacity, "grows back while right")
}

// TestDeltasRebuildTheDigest plays random traffic, with deltas lost on the way, against a peer's index.
func TestDeltasRebuildTheDigest(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	d := NewDigest(200 * PrefixBlockTokens)
	tbl := newFleet(2)
	pulls := 0
	for range 3000 {
		d.Touch(chain(uint64(rnd.IntN(60)), 1+rnd.IntN(20)), nil)
		if rnd.IntN(500) == 0 {
			d.Clear()
		}
		x, ok := d.Delta(2, DeltaMax)
		if !ok {
			continue
		}
		wire := x.Append(nil)
		require.LessOrEqual(t, len(wire), 255)
		y, err := DecodeDelta(wire)
		require.NoError(t, err)
		require.Equal(t, x, y)
		if rnd.IntN(10) == 0 {
			continue // lost
		}
		if !tbl.ApplyDelta(y, t0) {
			pulls++
			list, seq := d.Blocks()
			boot, seq, list, err := DecodeDigest(AppendDigest(nil, 2, seq, list))
			require.NoError(t, err)
			tbl.SetDigest(boot, seq, list, t0)
			require.True(t, tbl.ApplyDelta(y, t0), "a delta of the past is no gap")
		}
	}
	assert.Positive(t, pulls)
	for {
		x, ok := d.Delta(2, DeltaMax)
		if !ok {
			break
		}
		if !tbl.ApplyDelta(x, t0) {
			list, seq := d.Blocks()
			tbl.SetDigest(2, seq, list, t0)
		}
	}
	want, _ := d.Blocks()
	var got []uint32
	for b := range tbl.index.held[tbl.Peer(2)] {
		got = append(got, b)
	}
	slices.Sort(want)
	slices.Sort(got)
	assert.Equal(t, want, got)
	tbl.RemoveMember(2, t0)
	assert.Empty(t, tbl.index.blocks, "nothing of it is left")
}

func TestDepartedDigest(t *testing.T) {
	tbl := newFleet(2)
	tbl.SetMember(Member{Boot: 2, Addr: "10.0.0.2:8081"}, t0)
	tbl.SetDigest(2, 1, []uint32{5, 6, 7}, t0)
	assert.Nil(t, tbl.Departed("10.0.0.2:8081", t0), "it is still there")
	tbl.RemoveMember(2, t0)
	assert.Equal(t, []uint32{5, 6, 7}, tbl.Departed("10.0.0.2:8081", t0.Add(10*time.Minute)))
	assert.Nil(t, tbl.Departed("10.0.0.2:8081", t0.Add(10*time.Minute+1)))
	assert.Nil(t, tbl.Departed("10.0.0.3:8081", t0))
	d := NewDigest(0)
	d.Restore(tbl.Departed("10.0.0.2:8081", t0))
	assert.Equal(t, 3, d.Match([]uint64{5, 6, 7}))
	x, ok := d.Delta(3, DeltaMax)
	require.True(t, ok, "and is told to the peers")
	assert.Len(t, x.Added, 3)
}

func TestDigestBehind(t *testing.T) {
	tbl := newFleet(2)
	assert.False(t, tbl.DigestBehind(2), "its record does not say")
	r := ready(2, 2)
	r.PrefixSeq = Some(uint32(3))
	tbl.Update(r, t0)
	assert.True(t, tbl.DigestBehind(2))
	tbl.SetDigest(2, 3, nil, t0)
	assert.False(t, tbl.DigestBehind(2))
}

func TestPrefixIndex(t *testing.T) {
	tbl := newFleet(30)
	prefix := chain(1, 40)
	low := func(n int) (out []uint32) {
		for _, b := range prefix[:n] {
			out = append(out, uint32(b))
		}
		return out
	}
	for b := uint64(1); b <= 20; b++ {
		tbl.SetDigest(b, 1, low(2), t0) // a common system prompt
	}
	tbl.SetDigest(3, 1, low(33), t0)
	tbl.SetDigest(4, 1, low(24), t0)
	var k cachedBlocks
	tbl.index.find(prefix, &k)
	assert.Equal(t, 33, k.depth)
	assert.Equal(t, 1, k.best.n())
	assert.Equal(t, tbl.Peer(3), tbl.index.peer(k.best.slots[0]))
	assert.Equal(t, 33, k.blocks(tbl.Peer(3).slot))
	got := k.blocks(tbl.Peer(4).slot)
	assert.LessOrEqual(t, got, 24)
	assert.GreaterOrEqual(t, got, 20, "a lower bound by the depths looked at")
	assert.Equal(t, 2, k.everywhere)
	assert.Equal(t, 2, k.blocks(tbl.Peer(29).slot), "what is common is taken to be everywhere")
	assert.Equal(t, prefix[2], k.key(prefix), "the owners' key: the first block that is not everywhere")
	k = cachedBlocks{}
	tbl.index.find(prefix[:2], &k)
	assert.Equal(t, prefix[1], k.key(prefix[:2]), "all are common: the last")
	k = cachedBlocks{}
	other := chain(2, 3)
	tbl.index.find(other, &k)
	assert.Zero(t, k.everywhere)
	assert.Equal(t, other[0], k.key(other))

	// in the order of a pick: the holder is a candidate, and wins with its cached prefix
	r := ready(1, 2)
	r.PendingTokens = Some(900_000)
	tbl.Update(r, t0)
	d := mustPolicy(t, "auto").Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 40 * 512, Prefix: prefix}, t0, newRand(1))
	assert.Equal(t, uint64(3), d.Ask[0].Boot())
	assert.Equal(t, 7*512, d.AskTokens[0])
	assert.Equal(t, ReasonPrefix, d.Reason)
}

// finePrefix is a chain whose blocks are 64 tokens each, of which digests carry every fourth.
func finePrefix(session uint64, n int) (prefix []uint64, ends []uint32) {
	prefix = chain(session, n)
	for i := range prefix {
		if i%4 != 3 {
			prefix[i] |= FineBlock
		}
		ends = append(ends, uint32(64*(i+1)))
	}
	return prefix, ends
}

// Peers are told of few blocks; the books of the engine's own agent have all, and know how much each is.
func TestFineBlocksStayAtHome(t *testing.T) {
	d := NewDigest(64 * 20)
	prefix, ends := finePrefix(1, 15)
	d.Touch(prefix, ends)
	assert.Equal(t, 15, d.Match(prefix))
	assert.Equal(t, 15, d.Len())
	told, _ := d.Blocks()
	assert.Equal(t, []uint32{uint32(prefix[3]), uint32(prefix[7]), uint32(prefix[11])}, told)
	x, ok := d.Delta(2, DeltaMax)
	require.True(t, ok)
	assert.Equal(t, told, x.Added)

	other, _ := finePrefix(2, 10)
	d.Touch(other, ends)
	assert.Equal(t, 10, d.Match(prefix), "by tokens there is room for 20 blocks")
	x, ok = d.Delta(2, DeltaMax)
	require.True(t, ok)
	assert.Equal(t, []uint32{uint32(prefix[11])}, x.Dropped)

	tbl := newFleet(3)
	tbl.SetDigest(2, 1, told, t0)
	r := &Request{Model: "m", PromptTokens: 1000, Prefix: prefix, Ends: ends}
	assert.Equal(t, 1000-12*64, tbl.Uncached(tbl.Peer(2), r, t0))
	assert.Equal(t, 1000, tbl.Uncached(tbl.Peer(3), r, t0))
	var k cachedBlocks
	tbl.index.find(prefix[:11], &k)
	assert.Equal(t, 8, k.depth)
	assert.Equal(t, prefix[3], k.key(prefix), "owners too are found by a block that digests carry")
	assert.Equal(t, 11, reach(prefix, 8))
	assert.Equal(t, 12, reach(prefix[:12], 12))

	// Taken back after a restart, it has what peers were told, and grows with the next prompt.
	again := NewDigest(0)
	again.Restore(told)
	assert.Equal(t, 12, again.Match(prefix))
	again.Touch(prefix[:13], ends)
	assert.Equal(t, 13, again.Match(prefix))
	assert.Equal(t, 13*64, again.used)
	small := NewDigest(15 * 64)
	small.Restore(told)
	assert.Equal(t, 12, small.Match(prefix), "what fitted before fits again")
}

// Who holds what a digest tells may hold more of the prompt, so it is asked before our own replica is said to be as good.
func TestStayingAsksWhoMayHoldMore(t *testing.T) {
	tbl := newFleet(2)
	prefix, ends := finePrefix(1, 40)
	for i := range prefix {
		ends[i] *= 8 // 512 tokens a block, 2,048 between two that are told
	}
	own := NewDigest(0)
	own.Touch(prefix[:6], ends)
	tbl.SetOwnDigest(own)
	r := &Request{Model: "m", PromptTokens: 20_480, Prefix: prefix, Ends: ends}
	p := mustPolicy(t, "auto")
	tbl.SetDigest(2, 1, nil, t0)
	assert.Zero(t, p.Pick(tbl.Snapshot(), r, t0, newRand(1)).Asks, "nobody else has anything")
	tbl.SetDigest(2, 2, []uint32{uint32(prefix[3])}, t0)
	assert.Equal(t, 2, p.Pick(tbl.Snapshot(), r, t0, newRand(1)).Asks, "it has four blocks or up to seven, we have six")
}

func TestNewSessionsMeetAtTheirOwner(t *testing.T) {
	tbl := newFleet(60)
	p := mustPolicy(t, "auto")
	seen := map[uint64]bool{}
	for seed := range uint64(20) {
		r := ready(1, uint32(seed+2))
		r.PendingTokens = Some(90_000)
		tbl.Update(r, t0)
		d := p.Pick(tbl.Snapshot(), &Request{Model: "m", PromptTokens: 600, Prefix: chain(9, 1)}, t0, newRand(seed))
		seen[d.Ask[0].Boot()] = true
	}
	assert.Len(t, seen, 1, "idle replicas alike: the first owner is preferred, whoever asks")
}

func FuzzDecodeDelta(f *testing.F) {
	x := Delta{Boot: 7, Seq: 9, Added: []uint32{1, 2}, Dropped: []uint32{3}}
	f.Add(x.Append(nil))
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := DecodeDelta(b)
		if err != nil {
			require.ErrorIs(t, err, ErrDigest)
			return
		}
		require.Equal(t, b, d.Append(nil))
	})
}
