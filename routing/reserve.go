package routing

import (
	"math"
	"time"
)

const (
	// reserveFor is how long after its last request a class has slots kept free for it: what comes less often would cost those
	// below it more than it gains.
	reserveFor = 5 * time.Second
	// reserveShare is the most of an engine's slots that are kept free.
	reserveShare = 0.25
	// reserveMiss is the share of the higher requests that may find no free slot.
	reserveMiss = 0.01
	// reserveMemory is how many arrivals the mean time between two remembers.
	reserveMemory = 8
)

// Arrivals is how often requests of a class, or of one above it, come to an engine. The zero value is: never.
type Arrivals struct {
	last  time.Time
	every float64 // mean time between two, s
	n     int
}

// Came counts one.
func (a *Arrivals) Came(now time.Time) {
	d := reserveFor.Seconds()
	if a.n > 0 {
		d = min(d, max(0, now.Sub(a.last).Seconds()))
	}
	a.n++
	a.every += (d - a.every) / float64(min(a.n, reserveMemory))
	a.last = now
}

// Rate is how many come in a second; 0 if none came lately.
func (a *Arrivals) Rate(now time.Time) float64 {
	silent := now.Sub(a.last)
	if a.n == 0 || silent >= reserveFor {
		return 0
	}
	return 1 / max(a.every, silent.Seconds(), 1e-6)
}

// Reserve is how many of an engine's slots its agent keeps free of a class while requests of higher ones come at that rate, a
// second: so many that at most one of a hundred of them finds none, if the next slot is free between seconds later,
//
//	the least n ≥ 1 with P(Poisson(rate·between) ≥ n) ≤ 1 %, but at most a quarter of the slots
//
// Telephone networks call it trunk reservation: a few free lines keep the losses of one class apart from those of the others.
// Without it all slots are taken by those who came first, and a request of the highest class waits until one of them ends.
func Reserve(slots int, rate, between float64) int {
	most := int(reserveShare * float64(slots))
	if rate <= 0 || most < 1 {
		return 0
	}
	x := rate * max(0, between)
	n, p := 1, math.Exp(-x) // of exactly n-1
	for tail := 1 - p; n < most && tail > reserveMiss; n++ {
		p *= x / float64(n)
		tail -= p
	}
	return n
}
