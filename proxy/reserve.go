package proxy

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// reserve is what the gate knows of the classes at its engine, to keep slots free for the higher ones (routing.Reserve). The
// gate's lock guards it.
type reserve struct {
	inside   [routing.ClassBatch]int // at the engine, by class
	arrivals [routing.ClassBatch]routing.Arrivals
}

// came counts a request of a class.
func (r *reserve) came(line int, now time.Time) { r.arrivals[line].Came(now) }

// reserve returns how many slots are kept free of a class: none as long as it and those below it have less than their tenth, nor
// where the engine does not tell how many it has. The lock is held.
func (g *gate) reserve(line int, now time.Time) int {
	slots := g.view.RunLimit.V
	if line == 0 || slots <= 0 {
		return 0
	}
	rate, mine := 0.0, 0
	for i := range g.classes.arrivals {
		if i < line {
			rate += g.classes.arrivals[i].Rate(now)
		} else {
			mine += g.classes.inside[i]
		}
	}
	if rate == 0 || float64(mine) < max(1, restShare*float64(slots)) {
		return 0
	}
	between := 0.0
	if g.turns >= sureTurns {
		between = g.between
	}
	return routing.Reserve(slots, rate, between)
}
