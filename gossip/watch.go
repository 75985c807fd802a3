package gossip

import "cmp"

// Beyond 128 peers a record no longer goes to everybody. Members are put on a ring by a hash of their boot id, and each
// sends to its 64 predecessors: so each is heard by exactly 64 and hears exactly 64, and one change moves one place.

// before orders targets by their distance backwards from self on the ring, the nearest first.
func before(self uint64, a, b target) int {
	here := ringPlace(self)
	// The subtraction wraps as the ring does. Two of one boot id exist only for a moment, or by a hostile hand.
	return cmp.Or(cmp.Compare(here-ringPlace(a.boot), here-ringPlace(b.boot)), cmp.Compare(a.addr.Name, b.addr.Name), cmp.Compare(a.addr.Addr, b.addr.Addr))
}

// ringPlace is the finaliser of SplitMix64: neighbours in number are far apart on the ring.
func ringPlace(boot uint64) uint64 {
	boot ^= boot >> 30
	boot *= 0xbf58476d1ce4e5b9
	boot ^= boot >> 27
	boot *= 0x94d049bb133111eb
	return boot ^ boot>>31
}
