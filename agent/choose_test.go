package agent

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// A speed that nobody has measured for long is doubted: a replica taken for slow would stay idle for ever.
func TestDoubted(t *testing.T) {
	for _, c := range []struct {
		name  string
		rate  routing.Opt[float64]
		age   time.Duration
		fleet float64
		want  routing.Opt[float64]
	}{
		{"fresh", routing.Some(1000.0), 10 * time.Second, 8000, routing.Some(1000.0)},
		{"twice as old", routing.Some(1000.0), 20 * time.Second, 8000, routing.Some(2000.0)},
		{"four times", routing.Some(1000.0), 40 * time.Second, 8000, routing.Some(8000.0)},
		{"never above the fleet", routing.Some(1000.0), time.Hour, 8000, routing.Some(8000.0)},
		{"faster than the fleet", routing.Some(9000.0), time.Hour, 8000, routing.Some(9000.0)},
		{"never measured", routing.Opt[float64]{}, time.Hour, 8000, routing.Opt[float64]{}},
	} {
		now := time.Now()
		got := doubted(proxy.Load{PrefillRate: c.rate, PrefillAt: now.Add(-c.age)}, c.fleet, now)
		assert.Equal(t, c.want, got, c.name)
	}
}
