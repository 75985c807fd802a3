package proxy

import (
	"hash/maphash"
	"sync"
	"time"
)

const (
	deadlyDeaths = 2                // unannounced deaths after which a request is not tried again
	deadlyFor    = 60 * time.Second // for so long the same body is refused at this entry
	deadlyMost   = 1024             // bodies remembered
	deadlyBlames = 4                // deaths over several requests of one body that make it deadly though its prompt was worked off
)

// deadlySet remembers bodies that killed replicas, by a keyed hash.
type deadlySet struct {
	seed maphash.Seed

	mu     sync.Mutex
	until  map[uint64]time.Time
	blamed map[uint64]blamed
}

// blamed is a body with which replicas died that cannot have died of its prompt, since that was worked off by then. Others
// that are not streamed share its fate, so it takes more deaths than one request can see.
type blamed struct {
	deaths int
	until  time.Time
}

func newDeadlySet() *deadlySet {
	return &deadlySet{seed: maphash.MakeSeed(), until: make(map[uint64]time.Time), blamed: make(map[uint64]blamed)}
}

// hash is over the target and the whole body.
func (d *deadlySet) hash(target string, b *body) uint64 {
	var h maphash.Hash
	h.SetSeed(d.seed)
	_, _ = h.WriteString(target)
	_ = h.WriteByte(0)
	for _, blk := range b.blocks {
		_, _ = h.Write(blk)
	}
	return h.Sum64()
}

// add remembers a body. A body that is not wholly kept is not: its start alone would refuse innocent ones.
func (d *deadlySet) add(target string, b *body, now time.Time) {
	if !b.complete() {
		return
	}
	sum := d.hash(target, b)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.until) >= deadlyMost {
		for k, t := range d.until {
			if now.After(t) {
				delete(d.until, k)
			}
		}
	}
	if len(d.until) < deadlyMost {
		d.until[sum] = now.Add(deadlyFor)
	}
}

// blame counts a death and returns how many the body has seen within a minute. Called for deaths only, so seldom.
func (d *deadlySet) blame(target string, b *body, now time.Time) int {
	if !b.complete() {
		return 0
	}
	sum := d.hash(target, b)
	d.mu.Lock()
	defer d.mu.Unlock()
	for k, x := range d.blamed {
		if now.After(x.until) {
			delete(d.blamed, k)
		}
	}
	x := d.blamed[sum]
	if x.deaths == 0 && len(d.blamed) >= deadlyMost {
		return 0
	}
	x.deaths++
	x.until = now.Add(deadlyFor)
	d.blamed[sum] = x
	return x.deaths
}

// has reports whether the body is to be refused. It hashes only while there is something to compare with.
func (d *deadlySet) has(target string, b *body, now time.Time) bool {
	d.mu.Lock()
	n := len(d.until)
	d.mu.Unlock()
	if n == 0 || !b.complete() {
		return false
	}
	sum := d.hash(target, b)
	d.mu.Lock()
	defer d.mu.Unlock()
	t, ok := d.until[sum]
	if ok && now.After(t) {
		delete(d.until, sum)
		return false
	}
	return ok
}
