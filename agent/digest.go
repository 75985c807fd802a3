package agent

import (
	"context"
	"encoding/binary"
	"math"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

const (
	deltaEvery   = time.Second
	digestEvery  = 250 * time.Millisecond  // how often is looked whose digest is missing
	digestGrace  = 1200 * time.Millisecond // a record may come before the delta that it speaks of
	digestRetry  = 2 * time.Second
	digestCalm   = 10 * time.Second
	digestPulls  = 3
	restoreEvery = time.Second
	restoreFor   = 30 * time.Second // after the start, the own last digest is asked for
)

// digestBook is what the agent does about prefix digests beside the table, which holds them.
type digestBook struct {
	own *routing.Digest

	mu       sync.Mutex
	behind   map[uint64]time.Time // since when a peer's digest is behind its record
	gap      map[uint64]bool      // a delta did not fit: fetch the whole
	tried    map[uint64]time.Time
	pulls    map[uint64]int     // how often the whole was fetched
	starts   map[string]float64 // start of the engine whose whole digest came last from an address, Unix seconds
	start    float64            // of our own engine; 0 = unknown
	restored bool
}

func (b *digestBook) init() {
	b.own = routing.NewDigest(0)
	b.behind, b.gap, b.tried = map[uint64]time.Time{}, map[uint64]bool{}, map[uint64]time.Time{}
	b.starts, b.pulls = map[string]float64{}, map[uint64]int{}
}

// seq is what the record says about the own digest.
func (b *digestBook) seq() routing.Opt[uint32] { return routing.Some(b.own.Seq()) }

// see follows the size of the engine's KV cache, and forgets all when the engine is another process.
func (b *digestBook) see(rd engine.Reading) {
	if rd.KVCapacity.OK && rd.KVCapacity.V > 0 {
		b.own.Resize(rd.KVCapacity.V)
	}
	if !rd.ProcessStart.OK {
		return
	}
	b.mu.Lock()
	was := b.start
	b.start = rd.ProcessStart.V
	b.mu.Unlock()
	if was != 0 && was != rd.ProcessStart.V {
		b.own.Clear()
	}
}

// engineBack is called when the engine answers again after it was down: it is taken for another one, unless its pages
// say when it started; then see compares.
func (b *digestBook) engineBack() {
	b.mu.Lock()
	known := b.start != 0
	b.mu.Unlock()
	if !known {
		b.own.Clear()
	}
}

// shareDigests tells the others what goes through the own engine, at most one delta a second, and fetches what it missed
// of theirs.
func (a *Agent) shareDigests(ctx context.Context) error {
	b := &a.digests
	tick := time.NewTicker(digestEvery)
	defer tick.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxAsks)
	started := time.Now()
	var told, asked time.Time
	for {
		now := time.Now()
		if now.Sub(told) >= deltaEvery {
			if d, ok := b.own.Delta(a.boot, routing.DeltaMax); ok {
				told = now
				a.node.SendDelta(&d)
			}
		}
		if now.Sub(started) < restoreFor && now.Sub(asked) >= restoreEvery && b.wantsRestore() {
			asked = now
			wg.Go(func() { a.restoreDigest(ctx) })
		}
		for _, p := range a.table.Snapshot().Peers() {
			if p.Self() || !b.wants(a.table, p, now) {
				continue
			}
			wg.Go(func() {
				select {
				case slots <- struct{}{}:
					defer func() { <-slots }()
					a.pullDigest(ctx, p)
				case <-ctx.Done():
				}
			})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// onDelta takes a change of a peer's digest; gossip calls it on its packet goroutine.
func (a *Agent) onDelta(d routing.Delta) {
	if !a.table.ApplyDelta(d, time.Now()) {
		a.digests.mu.Lock()
		a.digests.gap[d.Boot] = true
		a.digests.mu.Unlock()
	}
}

// wants reports whether p's whole digest is to be fetched now.
func (b *digestBook) wants(t *routing.Table, p *routing.Peer, now time.Time) bool {
	behind := t.DigestBehind(p.Boot())
	r, _ := p.Report()
	b.mu.Lock()
	defer b.mu.Unlock()
	boot := p.Boot()
	since, waits := b.behind[boot]
	switch {
	case !behind:
		delete(b.behind, boot)
		delete(b.gap, boot)
		// The whole is fetched all the same until the start of its engine is known: the successor of that agent will ask.
		if r.PrefixSeq.V == 0 || b.starts[p.Member().Addr] != 0 || b.pulls[boot] >= digestPulls || now.Sub(b.tried[boot]) < digestCalm {
			return false
		}
		b.tried[boot] = now
		return true
	case !waits:
		b.behind[boot] = now
		since = now
	}
	if !b.gap[boot] && now.Sub(since) < digestGrace || now.Sub(b.tried[boot]) < digestRetry {
		return false
	}
	b.tried[boot] = now
	return true
}

func (a *Agent) pullDigest(ctx context.Context, p *routing.Peer) {
	reply, err := a.proxy.Ask(ctx, p.Boot(), pullTimeout, proxy.AskDigest, nil)
	if err != nil || len(reply) < 8 {
		a.log.Debug("prefix digest of a member", KeyMember, p.Member().Node, KeyErr, err)
		return
	}
	boot, seq, blocks, err := routing.DecodeDigest(reply[8:])
	if err != nil || boot != p.Boot() {
		return
	}
	a.table.SetDigest(boot, seq, blocks, time.Now())
	a.digests.mu.Lock()
	defer a.digests.mu.Unlock()
	if len(a.digests.starts) > 4096 {
		clear(a.digests.starts)
	}
	a.digests.pulls[boot]++
	a.digests.starts[p.Member().Addr] = math.Float64frombits(binary.LittleEndian.Uint64(reply))
	delete(a.digests.gap, boot)
	delete(a.digests.behind, boot)
}

// forget drops what is noted about a member that went.
func (b *digestBook) forget(boot uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.behind, boot)
	delete(b.gap, boot)
	delete(b.tried, boot)
	delete(b.pulls, boot)
}

// wantsRestore reports whether our last life's digest is still of use: nothing was restored yet, and the engine's start
// is known, so that it can be compared.
func (b *digestBook) wantsRestore() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.restored && b.start != 0
}

// restoreDigest asks some others for the digest of the agent that was at our address before, and takes the longest if the
// engine is still the same process.
func (a *Agent) restoreDigest(ctx context.Context) {
	b := &a.digests
	var best []uint32
	from := ""
	b.mu.Lock()
	own := b.start
	b.mu.Unlock()
	for i, p := range a.table.Snapshot().Peers() {
		if p.Self() || i > maxAsks {
			continue
		}
		reply, err := a.proxy.Ask(ctx, p.Boot(), askTimeout, proxy.AskDigest, []byte(a.member.Addr))
		if err != nil || len(reply) < 8 {
			continue
		}
		start := math.Float64frombits(binary.LittleEndian.Uint64(reply))
		_, _, blocks, err := routing.DecodeDigest(reply[8:])
		if err == nil && start == own && len(blocks) > len(best) {
			best, from = blocks, p.Member().Node
		}
	}
	b.mu.Lock()
	ok := len(best) > 0 && own == b.start && !b.restored
	b.restored = b.restored || ok
	b.mu.Unlock()
	if !ok {
		return
	}
	b.own.Restore(best)
	// So many changes would take their time as deltas: without them the others see a gap and fetch the whole.
	for more := true; more; {
		_, more = b.own.Delta(a.boot, routing.DeltaMax)
	}
	a.log.Info("own prefix digest taken back", KeyMember, from, "blocks", len(best))
}

// answerDigest answers with the start of the engine, Unix seconds f64, and a whole digest: our own, or, if the question
// names an address, that of the agent that was there last.
func (a *Agent) answerDigest(payload, reply []byte) ([]byte, bool) {
	b := &a.digests
	le := binary.LittleEndian
	if len(payload) == 0 {
		b.mu.Lock()
		start := b.start
		b.mu.Unlock()
		reply = le.AppendUint64(reply, math.Float64bits(start))
		blocks, seq := b.own.Blocks()
		return routing.AppendDigest(reply, a.boot, seq, blocks), true
	}
	addr := string(payload)
	blocks := a.table.Departed(addr, time.Now())
	b.mu.Lock()
	start := b.starts[addr]
	b.mu.Unlock()
	reply = le.AppendUint64(reply, math.Float64bits(start))
	return routing.AppendDigest(reply, 0, 0, blocks), true
}
