package routing

import "sync/atomic"

// censusFor is how long a count of a large group holds.
const censusFor tick = 100e6

// census remembers whether a large group is in a panic. Picks from it look at a few members only, so one pick in a
// while counts them all; small groups are counted at every pick.
type census struct {
	at     atomic.Int64
	panics atomic.Bool
}

// panicking reports whether fewer than half of the group's members that are not leaving are usable.
func (g *group) panicking(now tick) bool {
	at := tick(g.census.at.Load())
	if now >= at && now-at < censusFor {
		return g.census.panics.Load()
	}
	usable, members := 0, 0
	for i := range g.entries {
		p := g.entries[i].peer
		switch l := p.level(p.view.Load(), now, 1); {
		case l <= levelKept, l == levelRefuses:
			usable++
			members++
		case l < levelShort:
			members++
		}
	}
	p := panics(usable, members)
	g.census.panics.Store(p)
	g.census.at.Store(int64(now))
	return p
}
