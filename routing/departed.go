package routing

import (
	"maps"
	"slices"
	"time"
)

const (
	// departedFor is how long the digest of a member that left is kept for its successor.
	departedFor = 10 * time.Minute
	departedMax = 256
)

// departed is what a member that left had cached: its agent may be back at the same address in a moment, with an engine
// that never stopped.
type departed struct {
	blocks []uint32
	at     time.Time
}

// depart keeps the digest of a member that leaves; the table's lock is held.
func (t *Table) depart(p *Peer, now time.Time) {
	maps.DeleteFunc(t.departed, func(_ string, d departed) bool { return now.Sub(d.at) > departedFor })
	t.index.mu.RLock()
	held := t.index.held[p]
	blocks := slices.Collect(maps.Keys(held))
	slices.SortFunc(blocks, func(a, b uint32) int { return int(int32(held[b] - held[a])) })
	t.index.mu.RUnlock()
	if addr := p.member.Load().Addr; addr != "" && len(blocks) > 0 && len(t.departed) < departedMax {
		t.departed[addr] = departed{blocks, now}
	}
}

// Departed returns the last digest of the member that left from that address, within the last ten minutes: for the
// agent that starts there now, if its engine's start time is unchanged; what was heard
// of last comes first, as in Digest.Blocks: what is used again is told to nobody.
func (t *Table) Departed(addr string, now time.Time) []uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	d, ok := t.departed[addr]
	if !ok || now.Sub(d.at) > departedFor {
		return nil
	}
	return d.blocks
}
