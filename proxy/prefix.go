package proxy

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"sync/atomic"
)

// Prompts are compared by hashes of their growing prefixes; the hash of a prefix of k blocks is a chain over the k content
// hashes:
//
//	c(0) = F(model, adapter, template arguments, cache_salt)
//	c(i) = F(c(i−1), h(i))          F = SipHash-2-4 of the two, where digests carry block i
//	c(i) = G(c(i−1), h(i))          G = a multiplication with a key, where they do not: most blocks
//
// The content hashes h are fast and taken as the body arrives; the chain is closed when the body is whole,
// because what c(0) covers may stand behind the messages. F's key comes from the cluster key, so that hashes
// in a digest say nothing to who does not have it: they cannot even check a guess. A pseudorandom function is all that takes,
// and SipHash is one for inputs as short as these.
//
// Where blocks end hangs on nothing but the position in the text, so that all agents agree from the first request on, whatever
// they know of the model's tokens: every 128 bytes at first, then eight times while the prefix doubles, from 16 KiB on every
// 2,048 bytes. What every agent keeps of every other is coarser, see carried; the agent at the engine, and who asks it, knows all.
const (
	leastBlock  = 128
	blockBytes  = 2048 // some 512 tokens of prose
	stripeBytes = 64
	maxBlocks   = 4096 // 2 million tokens; what lies behind has no hashes
)

// blockSize returns the bytes of the block that begins at that position of a text.
func blockSize(at int) int {
	return min(blockBytes, max(leastBlock, 1<<max(0, bits.Len(uint(at))-4)))
}

// carried reports whether digests carry the block that ends at that position: at 256, 512 and 1,024 bytes, and every 2,048.
func carried(end int) bool { return end%blockBytes == 0 || end >= 2*leastBlock && end&(end-1) == 0 }

// PrefixSalt is what a cluster's hashes are keyed with. All agents that share digests need the same. It is safe for concurrent
// use.
type PrefixSalt struct{ now atomic.Pointer[saltKeys] }

type saltKeys struct {
	chain [2]uint64
	lanes [4]uint64
	empty uint64 // the hash of a stream without a byte
}

// NewPrefixSalt derives a salt from a cluster key. An empty key is allowed (a cluster without one).
func NewPrefixSalt(key []byte) *PrefixSalt {
	s := new(PrefixSalt)
	s.Set(key)
	return s
}

// Set derives the salt anew from a key, and reports whether it is another one. Hashes of before say nothing then.
func (s *PrefixSalt) Set(key []byte) (changed bool) {
	b, err := hkdf.Key(sha256.New, key, nil, "grapevine prefix hashes v3", 48)
	if err != nil { // 48 bytes are far below HKDF's limit
		panic(err)
	}
	k := new(saltKeys)
	for i := range k.chain {
		k.chain[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	for i := range k.lanes {
		k.lanes[i] = binary.LittleEndian.Uint64(b[16+8*i:]) | 1
	}
	h := blockHash{salt: k}
	h.reset()
	k.empty = h.finish()
	old := s.now.Swap(k)
	return old != nil && *old != *k
}

// keys returns what to hash one request with; nil without a salt.
func (s *PrefixSalt) keys() *saltKeys {
	if s == nil {
		return nil
	}
	return s.now.Load()
}

// next is F: the hash of a prefix from the hash of the one before and its last block.
func (s *saltKeys) next(prev, block uint64) uint64 { return sipHash(s.chain, prev, block) }

// step is G.
func (s *saltKeys) step(prev, block uint64) uint64 { return mum(prev^s.lanes[0], block^s.lanes[1]) }

// Session is the salted hash of a session key, for routing.Request.Session; 0 for an empty key only.
func (s *PrefixSalt) Session(key string) uint64 {
	if key == "" {
		return 0
	}
	k := s.keys()
	h := blockHash{salt: k}
	h.reset()
	h.writeString(key)
	return max(1, k.next(sessionDomain, h.finish()))
}

// Domains keep the uses of next apart.
const (
	modelDomain   = 0x6d6f64656c
	sessionDomain = 0x73657373
)

// blockHash hashes a stream that comes in pieces, block by block. It holds at most one 64-byte stripe of it.
// A nil salt makes it a mere counter.
type blockHash struct {
	salt   *saltKeys
	lanes  [4]uint64
	at     int // where the current block begins
	size   int // bytes of it
	n      int // bytes in buf
	fill   int // bytes of the current block that went into lanes
	blocks []uint64
	buf    [stripeBytes]byte
}

// reset forgets the stream and keeps the memory.
func (h *blockHash) reset() {
	h.at, h.size, h.n, h.fill, h.blocks = 0, leastBlock, 0, 0, h.blocks[:0]
	if h.salt != nil {
		h.lanes = h.salt.lanes
	}
}

func (h *blockHash) write(p []byte) {
	if h.salt == nil {
		return
	}
	if h.n > 0 || len(p) < stripeBytes {
		k := copy(h.buf[h.n:], p)
		h.n += k
		p = p[k:]
		if h.n < stripeBytes {
			return
		}
		h.stripes(h.buf[:])
		h.n = 0
	}
	if whole := len(p) &^ (stripeBytes - 1); whole > 0 {
		h.stripes(p[:whole])
		p = p[whole:]
	}
	h.n = copy(h.buf[:], p)
}

// writeString is write without a conversion that allocates.
func (h *blockHash) writeString(s string) {
	if h.salt == nil {
		return
	}
	for len(s) > 0 {
		k := copy(h.buf[h.n:], s)
		h.n += k
		s = s[k:]
		if h.n == stripeBytes {
			h.stripes(h.buf[:])
			h.n = 0
		}
	}
}

func (h *blockHash) writeByte(c byte) {
	if h.salt == nil {
		return
	}
	h.buf[h.n] = c
	if h.n++; h.n == stripeBytes {
		h.stripes(h.buf[:])
		h.n = 0
	}
}

func (h *blockHash) writeUint(v uint64) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	for _, c := range b {
		h.writeByte(c)
	}
}

// stripes takes whole stripes and closes blocks on the way.
func (h *blockHash) stripes(p []byte) {
	for len(p) > 0 {
		part := p[:min(len(p), h.size-h.fill)]
		p = p[len(part):]
		h.fill += len(part)
		k := &h.salt.lanes
		l0, l1, l2, l3 := h.lanes[0], h.lanes[1], h.lanes[2], h.lanes[3]
		for len(part) >= stripeBytes {
			s := (*[stripeBytes]byte)(part)
			l0 = mum(binary.LittleEndian.Uint64(s[0:])^k[0], binary.LittleEndian.Uint64(s[8:])^l0)
			l1 = mum(binary.LittleEndian.Uint64(s[16:])^k[1], binary.LittleEndian.Uint64(s[24:])^l1)
			l2 = mum(binary.LittleEndian.Uint64(s[32:])^k[2], binary.LittleEndian.Uint64(s[40:])^l2)
			l3 = mum(binary.LittleEndian.Uint64(s[48:])^k[3], binary.LittleEndian.Uint64(s[56:])^l3)
			part = part[stripeBytes:]
		}
		h.lanes = [4]uint64{l0, l1, l2, l3}
		if h.fill == h.size {
			if len(h.blocks) < maxBlocks {
				h.blocks = append(h.blocks, h.sum())
			}
			h.at += h.size
			h.size = blockSize(h.at)
			h.fill, h.lanes = 0, h.salt.lanes
		}
	}
}

// length is how many bytes came so far.
func (h *blockHash) length() int { return h.at + h.fill + h.n }

// sum folds the lanes and the length of the current block.
func (h *blockHash) sum() uint64 {
	k := &h.salt.lanes
	return mum(h.lanes[0]^k[1], h.lanes[1]^k[2]) ^ mum(h.lanes[2]^k[3], h.lanes[3]^k[0]^uint64(h.fill)<<32)
}

// finish is the hash of what follows the last whole block, with the number of blocks; it ends the stream.
func (h *blockHash) finish() uint64 {
	if h.salt == nil {
		return 0
	}
	tail := uint64(h.n)
	if h.n > 0 {
		clear(h.buf[h.n:])
		h.stripes(h.buf[:])
		h.n = 0
	}
	sum := h.sum() ^ tail
	for _, b := range h.blocks {
		sum = mum(sum^h.salt.lanes[0], b^h.salt.lanes[1])
	}
	return sum
}

// mum multiplies to 128 bits and folds them, the mixing step of wyhash.
func mum(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// sipHash is SipHash-2-4 of the 16 bytes of two little-endian words.
func sipHash(key [2]uint64, m0, m1 uint64) uint64 {
	v0, v1, v2, v3 := key[0]^0x736f6d6570736575, key[1]^0x646f72616e646f6d, key[0]^0x6c7967656e657261, key[1]^0x7465646279746573
	for _, m := range [...]uint64{m0, m1, 16 << 56} { // the last word has the length
		v3 ^= m
		v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
		v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
		v0 ^= m
	}
	v2 ^= 0xff
	for range 4 {
		v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	}
	return v0 ^ v1 ^ v2 ^ v3
}

func sipRound(v0, v1, v2, v3 uint64) (uint64, uint64, uint64, uint64) {
	v0, v2 = v0+v1, v2+v3
	v1, v3 = bits.RotateLeft64(v1, 13)^v0, bits.RotateLeft64(v3, 16)^v2
	v0, v2 = bits.RotateLeft64(v0, 32)+v3, v2+v1
	v1, v3 = bits.RotateLeft64(v1, 17)^v2, bits.RotateLeft64(v3, 21)^v0
	return v0, v1, bits.RotateLeft64(v2, 32), v3
}
