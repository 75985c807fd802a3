package routing

import (
	"maps"
	"slices"
	"sync"
)

// Digest is what our own engine has cached, as far as we can tell: an LRU of the chained block hashes of the prompts
// that went through it, sized to its KV cache. It is safe for concurrent use.
//
// Within one prompt the first block counts as used last, so that the deepest blocks of a chain fall out first and
// whoever holds a block holds all before it.
type Digest struct {
	mu       sync.Mutex
	full     int // prompt tokens that the KV cache has room for
	capacity int // … and that we believe to last, corrected by what the engine says
	used     int // of those, by the blocks
	index    map[uint32]int32
	nodes    []digestNode
	free     []int32
	head     int32 // used last
	tail     int32
	seq      uint32
	added    map[uint32]struct{} // changes that no delta has carried yet
	dropped  map[uint32]struct{}
	expected map[uint32]int32 // blocks of requests that wait for the engine, and of how many
}

type digestNode struct {
	block      uint32
	tokens     int32 // in the block
	fine       bool  // peers are not told of it
	prev, next int32
}

const noNode int32 = -1

// NewDigest returns an empty digest for an engine with that many tokens of KV cache; 0 = unknown, then 430,000 are
// assumed, as an 8B model has on an 80 GB card.
func NewDigest(kvTokens int) *Digest {
	d := &Digest{expected: map[uint32]int32{}}
	d.reset()
	d.Resize(kvTokens)
	return d
}

const defaultKVTokens = 430_000

// Resize sets the KV capacity in tokens; 0 = unknown.
func (d *Digest) Resize(kvTokens int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if kvTokens <= 0 {
		kvTokens = defaultKVTokens
	}
	if kvTokens == d.full {
		return // what was learned holds
	}
	d.full, d.capacity = kvTokens, kvTokens
	d.evict()
}

// Clear forgets all: the engine has restarted.
func (d *Digest) Clear() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for b := range d.index {
		d.drop(b)
	}
	added, dropped := d.added, d.dropped
	d.reset()
	d.added, d.dropped = added, dropped
}

func (d *Digest) reset() {
	d.index = map[uint32]int32{}
	d.nodes, d.free, d.used = nil, nil, 0
	d.head, d.tail = noNode, noNode
	d.added, d.dropped = map[uint32]struct{}{}, map[uint32]struct{}{}
}

// Len returns how many blocks it holds.
func (d *Digest) Len() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.index)
}

// Match returns how many leading blocks of the prefix are cached by the time a request that comes now gets its turn: those
// cached now, and those of requests that wait before it. Without these a fleet with cold caches and full queues never
// gets warm: the turns of one session, each answered by agents that know nothing of the ones before, go everywhere.
//
// A digest that was taken back after a restart has no fine blocks: who has a block has those before it.
func (d *Digest) Match(prefix []uint64) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	depth := 0
	near := d.head
	for i, b := range prefix {
		n, ok := d.find(uint32(b), near)
		if ok {
			near = d.nodes[n].next
		}
		fine := b&FineBlock != 0
		switch {
		case (ok || d.expected[uint32(b)] > 0) && (depth == i || !fine):
			depth = i + 1
		case !fine:
			return depth
		}
	}
	return depth
}

// Expect notes that a request with this prefix waits for the engine, until Forgo.
func (d *Digest) Expect(prefix []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range prefix {
		d.expected[uint32(b)]++
	}
}

// Forgo ends what Expect began: the request goes to the engine now, or will not come.
func (d *Digest) Forgo(prefix []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range prefix {
		if d.expected[uint32(b)]--; d.expected[uint32(b)] <= 0 {
			delete(d.expected, uint32(b))
		}
	}
}

// Touch notes that a prompt with this prefix went through the engine; ends are Request.Ends.
func (d *Digest) Touch(prefix []uint64, ends []uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	near := noNode
	for i := len(prefix) - 1; i >= 0; i-- {
		b, tokens := uint32(prefix[i]), int32(PrefixBlockTokens)
		if i < len(ends) {
			tokens = int32(ends[i])
			if i > 0 {
				tokens -= int32(ends[i-1])
			}
		}
		n, ok := d.find(b, near)
		if ok {
			near = d.nodes[n].prev
			d.unlink(n)
		} else {
			n = d.put(b, prefix[i]&FineBlock != 0)
		}
		d.used += int(tokens - d.nodes[n].tokens)
		d.nodes[n].tokens = tokens
		d.push(n)
	}
	d.evict()
}

// find returns a block's node. The blocks of a prompt lie one behind the other in the list, so the neighbour of the one before is
// mostly it.
func (d *Digest) find(b uint32, near int32) (n int32, ok bool) {
	if near != noNode && d.nodes[near].block == b {
		return near, true
	}
	n, ok = d.index[b]
	return n, ok
}

// put adds a block, without tokens and outside of the list.
func (d *Digest) put(b uint32, fine bool) int32 {
	n := d.node(b)
	d.nodes[n].fine = fine
	d.index[b] = n
	if fine {
		return n
	}
	if _, ok := d.dropped[b]; ok {
		delete(d.dropped, b)
	} else {
		d.added[b] = struct{}{}
	}
	return n
}

// Correct compares what we believed with what the engine reported for one request, both in prompt tokens. Where the
// engine had less, its cache is smaller or busier than we thought, and the digest gives up a little at its old end; where
// we were right it grows back by as much. So it is wrong about half of the requests at most. A busy engine often has less
// for a moment only, while the same prefix is being computed for another request: giving up more at once takes from a
// fleet under load what it knows (simulated agents at 85 % load: 5 s to the first token with a twentieth, 0.2 s so).
func (d *Digest) Correct(believed, cached int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case believed-cached >= PrefixBlockTokens:
		d.capacity = max(min(d.full, leastDigest), d.capacity-d.full/400)
	case believed > 0:
		d.capacity = min(d.full, d.capacity+d.full/400)
	}
	d.evict()
}

// leastDigest is what a digest keeps whatever the engine says, in prompt tokens.
const leastDigest = 8192

// Blocks returns all blocks that peers are told of, used last first, with the sequence number of the newest delta.
func (d *Digest) Blocks() (blocks []uint32, seq uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	blocks = make([]uint32, 0, len(d.index))
	for n := d.head; n != noNode; n = d.nodes[n].next {
		if x := &d.nodes[n]; !x.fine {
			blocks = append(blocks, x.block)
		}
	}
	return blocks, d.seq
}

// Restore fills an empty digest with blocks in the order that Blocks gave: our own last digest, taken back from a peer
// after a restart of the agent alone. How many tokens a block has is told by the next prompt with it; until then
// 512, or what makes all of them fit, as they did.
func (d *Digest) Restore(blocks []uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	tokens := max(1, min(PrefixBlockTokens, d.capacity/max(1, len(blocks))))
	for i := len(blocks) - 1; i >= 0; i-- {
		if _, ok := d.index[blocks[i]]; ok {
			continue
		}
		n := d.put(blocks[i], false)
		d.nodes[n].tokens = int32(tokens)
		d.used += tokens
		d.push(n)
	}
	d.evict()
}

// Delta takes up to limit changes that no delta has carried yet, new blocks first, and gives them the next sequence
// number; false = there are none. What does not fit comes with the next one.
func (d *Digest) Delta(boot uint64, limit int) (Delta, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	limit = min(limit, DeltaMax)
	if limit <= 0 || len(d.added)+len(d.dropped) == 0 {
		return Delta{}, false
	}
	d.seq++
	x := Delta{Boot: boot, Seq: d.seq}
	// What was used last goes first, and of a chain its first block: without that one the others say nothing.
	for n := d.head; n != noNode && len(d.added) > 0 && len(x.Added) < limit; n = d.nodes[n].next {
		if b := d.nodes[n].block; has(d.added, b) {
			x.Added = append(x.Added, b)
			delete(d.added, b)
		}
	}
	for _, b := range slices.Sorted(maps.Keys(d.dropped)) {
		if len(x.Added)+len(x.Dropped) == limit {
			break
		}
		x.Dropped = append(x.Dropped, b)
		delete(d.dropped, b)
	}
	return x, true
}

func has(set map[uint32]struct{}, b uint32) bool {
	_, ok := set[b]
	return ok
}

// Seq returns the sequence number of the newest delta, for the load record.
func (d *Digest) Seq() uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seq
}

func (d *Digest) evict() {
	for d.used > d.capacity {
		d.drop(d.nodes[d.tail].block)
	}
}

func (d *Digest) drop(b uint32) {
	n := d.index[b]
	d.unlink(n)
	delete(d.index, b)
	d.free = append(d.free, n)
	d.used -= int(d.nodes[n].tokens)
	if d.nodes[n].fine {
		return
	}
	if _, ok := d.added[b]; ok {
		delete(d.added, b)
	} else {
		d.dropped[b] = struct{}{}
	}
}

func (d *Digest) node(b uint32) int32 {
	if l := len(d.free); l > 0 {
		n := d.free[l-1]
		d.free = d.free[:l-1]
		d.nodes[n] = digestNode{block: b}
		return n
	}
	d.nodes = append(d.nodes, digestNode{block: b})
	return int32(len(d.nodes) - 1)
}

func (d *Digest) unlink(n int32) {
	x := d.nodes[n]
	if x.prev != noNode {
		d.nodes[x.prev].next = x.next
	} else {
		d.head = x.next
	}
	if x.next != noNode {
		d.nodes[x.next].prev = x.prev
	} else {
		d.tail = x.prev
	}
}

func (d *Digest) push(n int32) {
	d.nodes[n].prev, d.nodes[n].next = noNode, d.head
	if d.head != noNode {
		d.nodes[d.head].prev = n
	} else {
		d.tail = n
	}
	d.head = n
}
