package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A speed that nobody has measured for long is doubted: a replica taken for slow would stay idle for ever.
func TestDoubted(t *testing.T) {
	for _, c := range []struct {
		name  string
		rate  Opt[float64]
		age   time.Duration
		fleet float64
		want  Opt[float64]
	}{
		{"fresh", Some(1000.0), 10 * time.Second, 8000, Some(1000.0)},
		{"twice as old", Some(1000.0), 20 * time.Second, 8000, Some(2000.0)},
		{"four times", Some(1000.0), 40 * time.Second, 8000, Some(8000.0)},
		{"never above the fleet", Some(1000.0), time.Hour, 8000, Some(8000.0)},
		{"faster than the fleet", Some(9000.0), time.Hour, 8000, Some(9000.0)},
		{"never measured", Opt[float64]{}, time.Hour, 8000, Opt[float64]{}},
	} {
		assert.Equal(t, c.want, Doubted(c.rate, c.age, c.fleet), c.name)
	}
}

// Equal engines must look equal: samples of a few prompts are up to twice too high or too low.
func TestPrefillRate(t *testing.T) {
	var p PrefillRate
	assert.Equal(t, Opt[float64]{}, p.Rate())
	for i := range 400 {
		p.Busy(time.Duration([]int{25, 50, 100, 25}[i%4]) * time.Millisecond) // 40,000, 20,000, 10,000, 40,000 a second
		assert.True(t, p.Finish(1000))
		if i > 100 {
			assert.InDelta(t, 27_500, p.Rate().V, 2_500, i)
		}
	}
	assert.False(t, p.Finish(100), "no time has passed")
	for range 100 { // three times slower
		p.Busy(150 * time.Millisecond)
		p.Finish(1000)
	}
	assert.Less(t, p.Rate().V, 8_000.0, "after 15 s")
}

// What the first few prompts said wrongly is soon forgotten.
func TestPrefillRateStart(t *testing.T) {
	var p PrefillRate
	for range 20 {
		p.Busy(40 * time.Millisecond)
		p.Finish(5) // 125 a second
	}
	for range 8 {
		p.Busy(50 * time.Millisecond)
		p.Finish(1000)
	}
	assert.InDelta(t, 20_000, p.Rate().V, 6_000)
}
