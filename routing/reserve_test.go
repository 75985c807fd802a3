package routing

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestReserve(t *testing.T) {
	for _, c := range []struct {
		slots         int
		rate, between float64
		want          int
	}{
		{64, 0, 0.1, 0},     // nobody comes
		{64, 1, 0, 1},       // the next slot is free at once
		{64, 0.1, 0.1, 1},   // one of a hundred meets another
		{64, 0.11, 0.1, 2},  // a few more do
		{64, 1, 1, 5},       // P(≥ 4) = 1.9 %, P(≥ 5) = 0.4 %
		{16, 1, 1, 4},       // no more than a quarter
		{64, 1e6, 1e6, 16},  // however many come
		{7, 1, 1, 1},        //
		{3, 1, 1, 0},        // a quarter of it is none
		{64, 1, -0.1, 1},    // a clock that went back
		{256, 10, 0.05, 4},  // P(≥ 3) = 1.4 %
		{256, 100, 0.01, 5}, // the same load as the fifth
	} {
		assert.Equal(t, c.want, Reserve(c.slots, c.rate, c.between), "%+v", c)
	}
	// An obvious twin: the tail of the Poisson distribution, term by term.
	for x := 0.001; x < 20; x *= 1.3 {
		n, tail := 1, 1-math.Exp(-x)
		for ; tail > 0.01; n++ {
			log := float64(n)*math.Log(x) - x
			for k := 2; k <= n; k++ {
				log -= math.Log(float64(k))
			}
			tail -= math.Exp(log)
		}
		assert.Equal(t, n, Reserve(1000, x, 1), "x = %v", x)
	}
}

func TestArrivals(t *testing.T) {
	var a Arrivals
	now := time.Unix(1000, 0)
	assert.Zero(t, a.Rate(now))
	a.Came(now)
	assert.InDelta(t, 0.2, a.Rate(now), 1e-9, "one in five seconds, at least")
	for range 100 {
		now = now.Add(100 * time.Millisecond)
		a.Came(now)
	}
	assert.InDelta(t, 10, a.Rate(now), 0.1)
	assert.InDelta(t, 0.5, a.Rate(now.Add(2*time.Second)), 0.01, "a silence counts")
	assert.Zero(t, a.Rate(now.Add(reserveFor)), "and then it is over")
	a.Came(now)
	a.Came(now.Add(-time.Second))
	assert.Positive(t, a.Rate(now), "a clock that goes back does no harm")
}
