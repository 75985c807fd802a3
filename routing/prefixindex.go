package routing

import (
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
	held   map[*Peer]map[uint32]struct{} // what each peer holds, for taking back
	slots  []*Peer                       // by slot; 0 is never used
}

func (x *prefixIndex) init() {
	x.blocks = map[uint32]holderSet{}
	x.held = map[*Peer]map[uint32]struct{}{}
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
	if int(h.count) < len(h.slots) {
		h.slots[h.count] = slot
	}
	h.count++
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
	depth  int       // leading blocks that the best holders have; 0 = nobody has any
	best   holderSet // those holders
	n      int
	probed [20]probe // other depths looked at, deepest last
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
	lo, hi := 0, len(prefix) // lo is held, hi+1 is not
	for lo < hi {
		mid := (lo + hi + 1) / 2
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
}

// blocks returns how many leading blocks the member is known to hold: at least this many.
func (k *cachedBlocks) blocks(slot uint16) int {
	for i := k.n - 1; i >= 0; i-- {
		if k.probed[i].set.has(slot) {
			return k.probed[i].depth
		}
	}
	return 0
}

// uncommon returns the index of the first block that less than a quarter of the members hold; the last one if all are
// common.
func (x *prefixIndex) uncommon(prefix []uint64, members int) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	common := func(i int) bool { return int(x.blocks[uint32(prefix[i])].count)*4 >= max(members, 8) }
	if !common(0) {
		return 0
	}
	lo, hi := 0, len(prefix)-1 // lo is common
	for lo < hi {
		mid := (lo + hi + 1) / 2
		if common(mid) {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return min(lo+1, len(prefix)-1)
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

// change adds and takes back blocks of a peer; the lock is held.
func (x *prefixIndex) change(p *Peer, added, dropped []uint32) {
	held := x.held[p]
	if held == nil {
		held = make(map[uint32]struct{}, len(added))
		x.held[p] = held
	}
	for _, b := range dropped {
		if _, ok := held[b]; ok {
			delete(held, b)
			x.drop(b, p.slot)
		}
	}
	for _, b := range added {
		if _, ok := held[b]; !ok {
			held[b] = struct{}{}
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
