package routing

import (
	"slices"
	"sync"
	"time"
)

// digestTrust is how old a peer's digest may be before we take it that we do not know what it has cached.
const digestTrust = tick(10 * time.Second)

// holderSet is who holds one block: up to eight, and how many there are. A block with more holders is common and says
// little.
type holderSet struct {
	slots [8]uint16
	count uint16
}

// n returns how many of the holders are listed.
func (h *holderSet) n() int { return min(int(h.count), len(h.slots)) }

func (h *holderSet) has(slot uint16) bool {
	for _, s := range h.slots[:h.n()] {
		if s == slot {
			return true
		}
	}
	return false
}

// prefixIndex is the inverted index of the peers' digests: block → holders. Blocks are the low 32 bits of the chained
// hashes, as they travel. Members get small slot numbers, so that the map holds no pointers.
type prefixIndex struct {
	mu     sync.RWMutex
	blocks map[uint32]holderSet
	held   map[*Peer]map[uint32]uint32 // what each peer holds, for taking back, with the order in which we heard of it
	heard  uint32                      // blocks heard of
	slots  []*Peer                     // by slot; 0 is never used
}

func (x *prefixIndex) init() {
	x.blocks = map[uint32]holderSet{}
	x.held = map[*Peer]map[uint32]uint32{}
	x.slots = []*Peer{nil}
}

// join gives a member a slot.
func (x *prefixIndex) join(p *Peer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for i := 1; i < len(x.slots); i++ {
		if x.slots[i] == nil {
			x.slots[i], p.slot = p, uint16(i)
			return
		}
	}
	p.slot = uint16(len(x.slots))
	x.slots = append(x.slots, p)
}

// leave takes a member's blocks and slot back.
func (x *prefixIndex) leave(p *Peer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.clear(p)
	delete(x.held, p)
	x.slots[p.slot] = nil
}

func (x *prefixIndex) clear(p *Peer) {
	for b := range x.held[p] {
		x.drop(b, p.slot)
	}
	x.held[p] = nil
}

func (x *prefixIndex) put(b uint32, slot uint16) {
	h := x.blocks[b]
	h.count++
	i := int(h.count) - 1
	if i >= len(h.slots) { // the listed ones stay a fair draw of all
		i = int(mix(uint64(b)<<32|uint64(slot)) % uint64(h.count))
	}
	if i < len(h.slots) {
		h.slots[i] = slot
	}
	x.blocks[b] = h
}

func (x *prefixIndex) drop(b uint32, slot uint16) {
	h, ok := x.blocks[b]
	if !ok {
		return
	}
	n := h.n()
	for i := range n {
		if h.slots[i] == slot {
			if int(h.count) <= len(h.slots) {
				h.slots[i] = h.slots[n-1]
			} else {
				h.slots[i] = 0 // one of those not listed could stand here; nobody knows which
			}
			break
		}
	}
	h.count--
	if h.count == 0 {
		delete(x.blocks, b)
		return
	}
	x.blocks[b] = h
}

// peer returns the member in a slot, or nil.
func (x *prefixIndex) peer(slot uint16) *Peer {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.slots[slot]
}

// cachedBlocks is what the index says about one request's prefix.
type cachedBlocks struct {
	depth      int       // leading blocks that the best holders have; 0 = nobody has any
	best       holderSet // those holders
	members    int       // of the fleet
	everywhere int       // leading blocks that half of them hold
	n          int
	probed     [20]probe // other depths looked at, deepest last
}

type probe struct {
	depth int
	set   holderSet
}

// find looks for the longest prefix that anybody holds. Who holds a block holds those before it (digests drop the
// deepest blocks of a chain first), so a binary search over the depth will do.
func (x *prefixIndex) find(prefix []uint64, k *cachedBlocks) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if len(x.blocks) == 0 {
		return
	}
	k.members = len(x.slots) - 1
	lo, hi := 0, len(prefix) // lo is held, hi+1 is not
	for {
		mid := between(prefix, lo, hi)
		if mid == 0 {
			break
		}
		h, ok := x.blocks[uint32(prefix[mid-1])]
		if !ok {
			hi = mid - 1
			continue
		}
		lo = mid
		k.depth, k.best = mid, h
		if k.n < len(k.probed) {
			k.probed[k.n] = probe{mid, h}
			k.n++
		}
	}
	x.findCommon(prefix, k)
}

// between returns the depth in (lo, hi] nearest to its middle whose block digests carry; 0 = there is none.
func between(prefix []uint64, lo, hi int) int {
	mid := (lo + hi + 1) / 2
	for d := mid; d <= hi && lo < hi; d++ {
		if prefix[d-1]&FineBlock == 0 {
			return d
		}
	}
	for d := mid - 1; d > lo; d-- {
		if prefix[d-1]&FineBlock == 0 {
			return d
		}
	}
	return 0
}

// reach returns how many leading blocks who is known to hold so many may hold: what follows them has no part in digests up to
// the next block that has.
func reach(prefix []uint64, blocks int) int {
	for blocks < len(prefix) && prefix[blocks]&FineBlock != 0 {
		blocks++
	}
	return blocks
}

// common reports whether a block is everywhere: half of the members hold it, and not all of them are listed.
func (k *cachedBlocks) common(h *holderSet) bool {
	return int(h.count) > len(h.slots) && int(h.count)*2 >= k.members
}

// blocks returns how many leading blocks the member is believed to hold: at least this many, by the depths looked at.
func (k *cachedBlocks) blocks(slot uint16) int {
	for i := k.n - 1; i >= 0; i-- {
		if p := &k.probed[i]; p.set.has(slot) || k.common(&p.set) {
			return max(p.depth, k.everywhere)
		}
	}
	return k.everywhere
}

// findCommon looks for how many leading blocks are everywhere; the lock is held.
func (x *prefixIndex) findCommon(prefix []uint64, k *cachedBlocks) {
	lo, hi := 0, k.depth // lo is common, hi+1 is not
	for {
		mid := between(prefix, lo, hi)
		if mid == 0 {
			break
		}
		if h := x.blocks[uint32(prefix[mid-1])]; k.common(&h) {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	k.everywhere = lo
}

// key returns the block that the prefix's owners are found by: the first one that is not everywhere, so that requests
// which share only what everybody shares do not all go to the same two. The last one if all are. (simlab, 64 replicas,
// agents-a: 147 ms so, 159 with the first block always, 169 with the first block that fewer than four hold.)
func (k *cachedBlocks) key(prefix []uint64) uint64 {
	return prefix[min(reach(prefix, k.everywhere), len(prefix)-1)]
}

// SetDigest replaces what a peer holds by its whole digest with that sequence number.
func (t *Table) SetDigest(boot uint64, seq uint32, blocks []uint32, now time.Time) {
	p := t.Peer(boot)
	if p == nil {
		return
	}
	x := &t.index
	x.mu.Lock()
	defer x.mu.Unlock()
	x.clear(p)
	x.change(p, blocks, nil)
	p.digestSeq = seq
	p.digestAt.Store(int64(t.clock.tick(now)))
}

// change adds blocks of a peer, given last used first, and takes others back; the lock is held.
func (x *prefixIndex) change(p *Peer, added, dropped []uint32) {
	held := x.held[p]
	if held == nil {
		held = make(map[uint32]uint32, len(added))
		x.held[p] = held
	}
	for _, b := range dropped {
		if _, ok := held[b]; ok {
			delete(held, b)
			x.drop(b, p.slot)
		}
	}
	for _, b := range slices.Backward(added) {
		if _, ok := held[b]; !ok {
			x.heard++
			held[b] = x.heard
			x.put(b, p.slot)
		}
	}
}

// SetOwnDigest gives the table our own digest, which is exact.
func (t *Table) SetOwnDigest(d *Digest) { t.own.Store(d) }

// cached returns how many leading blocks of the prefix p has, and whether that is more than a guess.
func (t *Table) cached(p *Peer, prefix []uint64, known *cachedBlocks, now tick) (blocks int, sure bool) {
	if p.self {
		if d := t.own.Load(); d != nil {
			return d.Match(prefix), true
		}
		return known.blocks(p.slot), true
	}
	at := tick(p.digestAt.Load())
	return known.blocks(p.slot), at != never && now-at < digestTrust
}
