package routing

import "sync/atomic"

// group is the replicas that list one model name, ordered by boot id.
type group struct {
	entries []entry
	self    int // our own index; -1 = not in the group
	owners  atomic.Pointer[owners]
	census  census
}

type entry struct {
	peer    *Peer
	boot    uint64 // the peer's, here so that a search touches no peer
	context int    // tokens; 0 = unknown
	serves  Service
}

// indexOf returns the index of p, or -1.
func (g *group) indexOf(p *Peer) int {
	lo, hi := 0, len(g.entries)
	for lo < hi {
		if mid := (lo + hi) / 2; g.entries[mid].boot < p.boot {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo < len(g.entries) && g.entries[lo].peer == p {
		return lo
	}
	return -1
}

// owners are the rendezvous owners by bucket: two indexes + 1, filled on first use.
type owners [ownerBuckets]atomic.Uint64

// ownerBuckets is into how many buckets keys fall for the table of rendezvous owners.
const ownerBuckets = 1 << 12

// add appends a replica once, even if it lists the name twice.
func (g *group) add(e entry) {
	if n := len(g.entries); n > 0 && g.entries[n-1].peer == e.peer {
		return
	}
	if e.peer.self {
		g.self = len(g.entries)
	}
	g.entries = append(g.entries, e)
}

// ownersOf returns the indexes of the two rendezvous owners of a key: of all replicas those with the highest hash of
// bucket and boot id, so that a member that comes or goes moves only its own keys. -1 = there is none.
func (g *group) ownersOf(key uint64) (first, second int) {
	table := g.owners.Load()
	if table == nil {
		g.owners.CompareAndSwap(nil, new(owners))
		table = g.owners.Load()
	}
	bucket := mix(key) % ownerBuckets
	if o := table[bucket].Load(); o != 0 {
		return int(uint32(o)) - 1, int(o>>32) - 1
	}
	first, second = -1, -1
	var h1, h2 uint64
	for i := range g.entries {
		h := mix(bucket<<32 ^ mix(g.entries[i].boot))
		switch {
		case first < 0 || h > h1:
			second, h2 = first, h1
			first, h1 = i, h
		case second < 0 || h > h2:
			second, h2 = i, h
		}
	}
	table[bucket].Store(uint64(uint32(first+1)) | uint64(second+1)<<32)
	return first, second
}

// mix is the finalizer of splitmix64: every input bit moves every output bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
