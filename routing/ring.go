package routing

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"sync"
	"time"
)

// Ring is a consistent hash ring. Each node stands at many points; a key belongs to the first point at or after its
// own hash. A node that comes or goes moves only the keys of its own arcs, about one in N.
type Ring struct {
	points []point
}

type point struct {
	hash uint64
	node int
}

// NewRing places nodes 0..n-1 at vnodes points each; hash gives the place of a node's v-th point.
func NewRing(n, vnodes int, hash func(node, v int) uint64) *Ring {
	r := &Ring{points: make([]point, 0, n*vnodes)}
	for i := range n {
		for v := range vnodes {
			r.points = append(r.points, point{hash(i, v), i})
		}
	}
	slices.SortFunc(r.points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.node, b.node))
	})
	return r
}

// Owner returns the node of the first point after key, or -1 on an empty ring.
func (r *Ring) Owner(key uint64) int {
	if len(r.points) == 0 {
		return -1
	}
	return r.points[r.after(key)].node
}

func (r *Ring) after(key uint64) int {
	return sort.Search(len(r.points), func(i int) bool { return r.points[i].hash > key }) % len(r.points)
}

// consistentHash sends a key to its owner on the ring, or, where that has more than bound times the mean in flight,
// to the next replica on the ring that has not (consistent hashing with bounded loads). Requests without a key are
// spread at random.
type consistentHash struct {
	vnodes int
	bound  float64

	mu    sync.Mutex
	rings map[*group]*Ring
	at    *Snapshot
}

func (*consistentHash) Name() string { return "consistent_hash" }

// ring returns the group's ring; rings of an older snapshot are forgotten.
func (a *consistentHash) ring(s *Snapshot, g *group) *Ring {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.at != s {
		a.at, a.rings = s, map[*group]*Ring{}
	}
	r := a.rings[g]
	if r == nil {
		r = NewRing(len(g.entries), a.vnodes, func(node, v int) uint64 {
			return mix(mix(g.entries[node].peer.boot) + uint64(v))
		})
		a.rings[g] = r
	}
	return r
}

func (a *consistentHash) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	x := newPool(s, r, now)
	if x.n == 0 {
		return s.none(x.g, r, now)
	}
	var key uint64
	switch {
	case r.Session != 0:
		key = mix(r.Session)
	case len(r.Prefix) > 0:
		key = mix(r.firstTokens())
	case rnd != nil:
		key = rnd.Uint64()
	}
	limit := math.Inf(1)
	if a.bound > 0 {
		total := int64(1)
		for p := range x.all {
			total += p.inflight.Load()
		}
		limit = math.Ceil(a.bound * float64(total) / float64(x.n))
	}
	ring := a.ring(s, x.g)
	start := ring.after(key)
	for i := range ring.points {
		e := &x.g.entries[ring.points[(start+i)%len(ring.points)].node]
		if x.allows(e) && float64(e.peer.inflight.Load()+1) <= limit {
			return x.decision(e.peer, ReasonHash)
		}
	}
	return s.none(x.g, r, now)
}
