package gossip

import (
	"cmp"
	"slices"
)

// Beyond 128 peers a record no longer goes to everybody. Members are put on a ring by a hash of their boot id, and each
// sends to its 64 predecessors: so each is heard by exactly 64 and hears exactly 64, and one change moves one place.

// predecessors returns the k targets before self on the ring, the nearest first; all of them if there are no more.
func predecessors(self uint64, ts []target, k int) []target {
	if len(ts) <= k {
		return ts
	}
	here := ringPlace(self)
	ring := slices.Clone(ts)
	slices.SortFunc(ring, func(a, b target) int {
		// Distance backwards from our place; the subtraction wraps as the ring does.
		return cmp.Compare(here-ringPlace(a.boot), here-ringPlace(b.boot))
	})
	return ring[:k:k]
}

// ringPlace is the finaliser of SplitMix64: neighbours in number are far apart on the ring.
func ringPlace(boot uint64) uint64 {
	boot ^= boot >> 30
	boot *= 0xbf58476d1ce4e5b9
	boot ^= boot >> 27
	boot *= 0x94d049bb133111eb
	return boot ^ boot>>31
}
