package enginesim

// cache is the prefix cache: blocks of prompt tokens under chained hashes. A block in use by running sequences is
// referenced; one that nobody uses stays in a list, least recently used last, until its room is needed.
type cache struct {
	index      map[uint64]int32
	nodes      []node
	free       []int32
	head, tail int32 // of the unreferenced ones, most recent first; -1 is none
	idle       int   // tokens in unreferenced blocks
}

type node struct {
	hash       uint64
	tokens     int32
	refs       int32
	prev, next int32 // valid while refs is 0
}

func newCache() cache { return cache{index: make(map[uint64]int32), head: -1, tail: -1} }

// match is the number of leading blocks that are cached.
func (c *cache) match(blocks []uint64) int {
	for i, h := range blocks {
		if _, ok := c.index[h]; !ok {
			return i
		}
	}
	return len(blocks)
}

// ref takes a block into use and returns the tokens that became referenced by it: none if somebody used it already.
func (c *cache) ref(i int32) int {
	n := &c.nodes[i]
	n.refs++
	if n.refs > 1 {
		return 0
	}
	c.unlink(i)
	return int(n.tokens)
}

// unref gives a block back and returns the tokens that nobody references any more.
func (c *cache) unref(i int32) int {
	n := &c.nodes[i]
	n.refs--
	if n.refs > 0 {
		return 0
	}
	c.pushFront(i)
	return int(n.tokens)
}

// add makes a block with one reference.
func (c *cache) add(hash uint64, tokens int) int32 {
	var i int32
	if l := len(c.free); l > 0 {
		i = c.free[l-1]
		c.free = c.free[:l-1]
	} else {
		i = int32(len(c.nodes))
		c.nodes = append(c.nodes, node{})
	}
	c.nodes[i] = node{hash: hash, tokens: int32(tokens), refs: 1, prev: -1, next: -1}
	c.index[hash] = i
	return i
}

// shrink evicts least recently used blocks until at most room tokens are idle.
func (c *cache) shrink(room int) {
	for c.idle > room && c.tail >= 0 {
		i := c.tail
		c.unlink(i)
		delete(c.index, c.nodes[i].hash)
		c.free = append(c.free, i)
	}
}

func (c *cache) unlink(i int32) {
	n := &c.nodes[i]
	if n.prev >= 0 {
		c.nodes[n.prev].next = n.next
	} else {
		c.head = n.next
	}
	if n.next >= 0 {
		c.nodes[n.next].prev = n.prev
	} else {
		c.tail = n.prev
	}
	c.idle -= int(n.tokens)
}

func (c *cache) pushFront(i int32) {
	n := &c.nodes[i]
	n.prev, n.next = -1, c.head
	if c.head >= 0 {
		c.nodes[c.head].prev = i
	} else {
		c.tail = i
	}
	c.head = i
	c.idle += int(n.tokens)
}
