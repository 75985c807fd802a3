package routing

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Delta is a change of a replica's digest, as it travels: 14 bytes of head, then 4 bytes a block, little endian.
//
//	boot id 8 · seq 4 · added 1 · dropped 1 · blocks 4 each
type Delta struct {
	Boot           uint64
	Seq            uint32 // one more than the delta before
	Added, Dropped []uint32
}

const (
	deltaHead = 14
	// DeltaMax is the most blocks in one delta: with the record's own head byte it stays within 256 bytes.
	DeltaMax = (256 - 1 - deltaHead) / 4
)

// ErrDigest is wrapped by all errors of decoding digests and deltas.
var ErrDigest = errors.New("bad prefix digest")

// Append appends the wire form.
func (d *Delta) Append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, d.Boot)
	dst = binary.LittleEndian.AppendUint32(dst, d.Seq)
	dst = append(dst, byte(len(d.Added)), byte(len(d.Dropped)))
	for _, b := range d.Added {
		dst = binary.LittleEndian.AppendUint32(dst, b)
	}
	for _, b := range d.Dropped {
		dst = binary.LittleEndian.AppendUint32(dst, b)
	}
	return dst
}

// DecodeDelta reads the wire form.
func DecodeDelta(b []byte) (Delta, error) {
	if len(b) < deltaHead {
		return Delta{}, fmt.Errorf("%w: delta of %d bytes", ErrDigest, len(b))
	}
	d := Delta{Boot: binary.LittleEndian.Uint64(b), Seq: binary.LittleEndian.Uint32(b[8:])}
	added, dropped := int(b[12]), int(b[13])
	b = b[deltaHead:]
	if len(b) != 4*(added+dropped) {
		return Delta{}, fmt.Errorf("%w: %d bytes for %d blocks", ErrDigest, len(b), added+dropped)
	}
	d.Added = blocks(b[:4*added])
	d.Dropped = blocks(b[4*added:])
	return d, nil
}

// MaxDigestBlocks bounds a whole digest: 8 million tokens of KV cache.
const MaxDigestBlocks = 1 << 14

// AppendDigest appends the wire form of a whole digest: boot id 8, seq 4, blocks 4 each, used last first.
func AppendDigest(dst []byte, boot uint64, seq uint32, blocks []uint32) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, boot)
	dst = binary.LittleEndian.AppendUint32(dst, seq)
	for _, b := range blocks[:min(len(blocks), MaxDigestBlocks)] {
		dst = binary.LittleEndian.AppendUint32(dst, b)
	}
	return dst
}

// DecodeDigest reads the wire form of a whole digest.
func DecodeDigest(b []byte) (boot uint64, seq uint32, list []uint32, err error) {
	if len(b) < 12 || len(b)%4 != 0 || len(b) > 12+4*MaxDigestBlocks {
		return 0, 0, nil, fmt.Errorf("%w: %d bytes", ErrDigest, len(b))
	}
	return binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:]), blocks(b[12:]), nil
}

func blocks(b []byte) []uint32 {
	if len(b) == 0 {
		return nil
	}
	out := make([]uint32, 0, len(b)/4)
	for c := range slices.Chunk(b, 4) {
		out = append(out, binary.LittleEndian.Uint32(c))
	}
	return out
}

// ApplyDelta applies a peer's delta. It returns false after a gap, or if the peer's whole digest never came: pull it.
// A delta of the past is dropped and reported as applied.
func (t *Table) ApplyDelta(d Delta, now time.Time) bool {
	p := t.Peer(d.Boot)
	if p == nil {
		return true
	}
	t.index.mu.Lock()
	defer t.index.mu.Unlock()
	switch step := int32(d.Seq - p.digestSeq); {
	case step <= 0 && p.digestAt.Load() != int64(never):
		return true
	case step != 1:
		return false
	}
	t.index.change(p, d.Added, d.Dropped)
	p.digestSeq = d.Seq
	p.digestAt.Store(int64(t.clock.tick(now)))
	return true
}

// DigestBehind reports whether the peer's record speaks of a digest that we do not have: pull it.
func (t *Table) DigestBehind(boot uint64) bool {
	p := t.Peer(boot)
	if p == nil {
		return false
	}
	v := p.view.Load()
	if v == nil || !v.report.PrefixSeq.OK {
		return false
	}
	t.index.mu.RLock()
	defer t.index.mu.RUnlock()
	return newer(v.report.PrefixSeq.V, p.digestSeq)
}
