package proxy

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// errBodyTooLarge is returned by reads of a body that grew past the limit.
var errBodyTooLarge = errors.New("request body is larger than the limit")

// replayBudget bounds the memory of all kept bodies together. A body whose model was not seen yet waits for memory that
// others give back; so that those who wait do not wait for each other, one at a time may pass the limit. The first
// keepAlways of each body are never refused: a sixteenth of the limit is left to them, so that large bodies do not make
// small ones pass it.
type replayBudget struct {
	limit    int64         // bytes
	patience time.Duration // longest wait for memory
	used     atomic.Int64

	waiting atomic.Int32
	mu      sync.Mutex
	freed   chan struct{} // closed when memory is given back; nil = nobody waits
	over    *body         // who may pass the limit
}

// take takes n bytes for more than the first of a body, if there are.
func (b *replayBudget) take(n int) bool {
	for {
		used := b.used.Load()
		if used+int64(n) > b.limit-b.limit/16 {
			return false
		}
		if b.used.CompareAndSwap(used, used+int64(n)) {
			return true
		}
	}
}

// give gives a body's memory back.
func (b *replayBudget) give(n int, of *body) {
	b.used.Add(-int64(n))
	if b.waiting.Load() == 0 && !of.over {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over == of {
		b.over = nil
	}
	if b.freed != nil {
		close(b.freed)
		b.freed = nil
	}
}

// wait waits for n bytes for the body, and reports whether it got them. A client that hangs up meanwhile ends ctx, unless the
// sockets' buffers are full of its body: its end stands behind what nobody reads then, and patience ends the wait.
func (b *replayBudget) wait(ctx context.Context, n int, by *body) bool {
	b.waiting.Add(1)
	defer b.waiting.Add(-1)
	limit := time.NewTimer(b.patience)
	defer limit.Stop()
	for {
		b.mu.Lock()
		if b.over == nil {
			b.over, by.over = by, true
		}
		if by.over {
			b.mu.Unlock()
			b.used.Add(int64(n))
			return true
		}
		if b.freed == nil {
			b.freed = make(chan struct{})
		}
		freed := b.freed
		b.mu.Unlock()
		if b.take(n) {
			return true
		}
		select {
		case <-freed:
		case <-limit.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// keepAlways is what is kept of every body, whatever the others take: the model mostly stands in it. Requests under
// way are bounded by themselves.
const keepAlways = 64 << 10 // bytes

// blockSizes are the sizes of the pieces in which bodies are kept: prompts are mostly a few KiB, images a few MiB.
var blockSizes = [...]int{1 << 10, 2304, 4 << 10, 16 << 10, 64 << 10}

var blockPools [len(blockSizes)]sync.Pool

func getBlock(class int) *[]byte {
	if b, ok := blockPools[class].Get().(*[]byte); ok {
		*b = (*b)[:0]
		return b
	}
	b := make([]byte, 0, blockSizes[class])
	return &b
}

func putBlock(b *[]byte) {
	for i, n := range blockSizes {
		if cap(*b) == n {
			blockPools[i].Put(b)
			return
		}
	}
}

// body is a request's body. It is read once from its source and kept, up to a budget, so that it can be sent again;
// what is past the budget goes through and cannot. One goroutine fills it and opens readers; a reader may live on in
// the upstream after the exchange has gone on, so the memory is given back when the last holder lets go.
type body struct {
	src    io.Reader
	limit  int64 // most bytes in all
	keep   int64 // most bytes kept of this request
	budget *replayBudget

	mu     sync.Mutex
	blocks [][]byte
	mem    []*[]byte // theirs
	n      int64     // bytes kept
	total  int64     // bytes read from src
	charge int       // taken from budget
	over   bool      // it may pass the budget's limit
	eof    bool      // src is read to its end
	live   bool      // bytes past the kept ones went out
	err    error     // why src ended early

	refs atomic.Int32

	// Most bodies have one block and are read once.
	block1  [1][]byte
	mem1    [1]*[]byte
	reader1 bodyReader
}

// begin makes b, which is new, the body that src brings.
func (b *body) begin(src io.Reader, limit, keep int64, budget *replayBudget) *body {
	b.src, b.limit, b.keep, b.budget = src, limit, keep, budget
	b.refs.Store(1)
	b.blocks, b.mem = b.block1[:0], b.mem1[:0]
	if src == nil {
		b.eof = true
	}
	return b
}

// fill reads from the source until its end or the budget's, showing each piece to look. length is what the head
// says, or -1. more reports whether what the choice needs is still missing; then the body's own budget is passed, and memory
// waited for.
// It returns the source's error: a client that went away, or errBodyTooLarge.
func (b *body) fill(ctx context.Context, length int64, look func([]byte), more func() bool) error {
	for !b.eof {
		last := len(b.blocks) - 1
		if last < 0 || len(b.blocks[last]) == cap(b.blocks[last]) {
			if b.n >= b.keep && !more() {
				return nil
			}
			blk := b.grow(ctx, length, more)
			if blk == nil {
				return nil
			}
			b.blocks, b.mem = append(b.blocks, *blk), append(b.mem, blk)
			last++
		}
		blk := b.blocks[last]
		n, err := b.src.Read(blk[len(blk):cap(blk)])
		if n > 0 {
			piece := blk[len(blk) : len(blk)+n]
			b.blocks[last] = blk[:len(blk)+n]
			b.n += int64(n)
			b.total += int64(n)
			if b.total > b.limit {
				b.err = errBodyTooLarge
				return b.err
			}
			look(piece)
		}
		if err == io.EOF {
			b.eof = true
		} else if err != nil {
			b.err = err
			return err
		}
	}
	return nil
}

// grow returns a block for what is still to come, or nil when the budget is used up.
func (b *body) grow(ctx context.Context, length int64, more func() bool) *[]byte {
	rest := length - b.n + 1 // one more, so that the end is seen without another block
	if length < 0 {
		rest = max(b.n, 1) // unknown: as much again as there is
	}
	class := len(blockSizes) - 1
	for i, n := range blockSizes {
		if rest <= int64(n) {
			class = i
			break
		}
	}
	if b.n < keepAlways {
		b.budget.used.Add(int64(blockSizes[class]))
	} else if n := blockSizes[class]; !b.budget.take(n) && (!more() || !b.budget.wait(ctx, n, b)) {
		return nil
	}
	b.charge += blockSizes[class]
	return getBlock(class)
}

// complete reports whether the whole body is kept.
func (b *body) complete() bool { return b.eof && b.total == b.n }

// again reports whether the body can still be sent from its first byte.
func (b *body) again() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.live && (b.err == nil || b.eof)
}

// failure returns why the source ended early, or nil.
func (b *body) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// open returns a reader from the first byte. Only the newest reader may read past the kept bytes.
func (b *body) open() io.ReadCloser {
	b.refs.Add(1)
	if r := &b.reader1; r.b == nil {
		r.b = b
		return r
	}
	return &bodyReader{b: b}
}

// release lets go of the body; the last holder's release gives the memory back.
func (b *body) release() {
	if b.refs.Add(-1) != 0 {
		return
	}
	for _, blk := range b.mem {
		putBlock(blk)
	}
	b.blocks, b.mem = nil, nil
	b.budget.give(b.charge, b)
}

// renewed returns b as new, or nil if somebody may still look at it: all must have let go of it, and none on a goroutine of its own,
// which might not be back from doing so.
func (b *body) renewed() *body {
	if b == nil || b.refs.Load() != 0 || !b.complete() || b.n > writeAside {
		return nil
	}
	*b = body{}
	return b
}

// drop is the release of the one that could have it sent again.
func (b *body) drop() {
	b.mu.Lock()
	b.live = true
	b.mu.Unlock()
	b.release()
}

// bodyReader reads a body from its start: the kept blocks, then the source.
type bodyReader struct {
	b      *body
	i, off int

	mu     sync.Mutex // keeps the blocks from being given back under a copy
	closed bool
}

func (r *bodyReader) Read(p []byte) (int, error) {
	n, err, more := r.kept(p)
	if !more {
		return n, err
	}
	b := r.b
	n, err = b.src.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.total += int64(n)
	if b.total > b.limit {
		n, err = 0, errBodyTooLarge
	}
	switch {
	case err == nil:
	case errors.Is(err, io.EOF):
		b.eof = true
	default:
		b.err = err
	}
	return n, err
}

// kept reads from the kept blocks; more means that they are used up and the source has more.
func (r *bodyReader) kept(p []byte) (n int, err error, more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, io.ErrClosedPipe, false
	}
	b := r.b
	for r.i < len(b.blocks) {
		blk := b.blocks[r.i]
		if r.off < len(blk) {
			n := copy(p, blk[r.off:])
			r.off += n
			return n, nil, false
		}
		r.i, r.off = r.i+1, 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.eof {
		return 0, io.EOF, false
	}
	if b.err != nil {
		return 0, b.err, false
	}
	b.live = true
	return 0, nil, true
}

// Close may come from another goroutine than Read's, also while a Read waits for the source.
func (r *bodyReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.closed = true
		r.b.release()
	}
	return nil
}
