package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestGateRoom(t *testing.T) {
	base := Gate{AtEngine: 3, Rate: 10_000, RunLimit: Some(8), KVUsed: Some(0.5), KVCapacity: Some(100_000)}
	for _, c := range []struct {
		name   string
		change func(*Gate)
		tokens int
		waited time.Duration
		want   bool
	}{
		{"nothing to do ahead", func(*Gate) {}, 1000, 0, true},
		{"what takes 5 ms is let through", func(g *Gate) { g.Prompts, g.Pending = 1, 50 }, 1000, 0, true},
		{"but no more than that", func(g *Gate) { g.Prompts, g.Pending = 1, 51 }, 1000, 0, false},
		{"nor for a request of which nothing is known", func(g *Gate) { g.Prompts, g.Pending = 1, 51 }, 0, 0, false},
		{"30 ms more for the one that is there", func(g *Gate) { g.Prompts, g.Pending = 1, 8192 }, 300, 0, true},
		{"more than that", func(g *Gate) { g.Prompts, g.Pending = 1, 8192 }, 301, 0, false},
		{"more than a step takes", func(g *Gate) { g.Prompts, g.Pending = 1, 8193 }, 300, 0, false},
		{"15 ms more for two", func(g *Gate) { g.Prompts, g.Pending = 2, 500 }, 150, 0, true},
		{"more than that for two", func(g *Gate) { g.Prompts, g.Pending = 2, 500 }, 151, 0, false},
		{"a step takes longer than 30 ms", func(g *Gate) { g.Step, g.Prompts, g.Pending = 0.05, 1, 500 }, 750, 0, true},
		{"more than one and a half steps' worth", func(g *Gate) { g.Step, g.Prompts, g.Pending = 0.05, 1, 500 }, 751, 0, false},
		{"two that wait behind it gain as well", func(g *Gate) { g.Prompts, g.Pending, g.Behind = 2, 500, 2 }, 450, 0, true},
		{"as much as it costs, and no more", func(g *Gate) { g.Prompts, g.Pending, g.Behind = 2, 500, 2 }, 451, 0, false},
		{"half of the patience gone", func(g *Gate) { g.Pending = 50 + (8192-50)/2 }, 1000, 250 * time.Millisecond, true},
		{"all of it", func(g *Gate) { g.Pending = 8193 }, 1000, time.Minute, false},
		{"a fast engine's patient are given 750 ms", func(g *Gate) { g.Rate, g.Pending = 20_000, 15_000 }, 1000, time.Minute, true},
		{"but no more", func(g *Gate) { g.Rate, g.Pending = 20_000, 15_001 }, 1000, time.Minute, false},
		{"no slot", func(g *Gate) { g.AtEngine = 8 }, 1000, 0, false},
		{"no slot, foreign ones counted", func(g *Gate) { g.AtEngine, g.Foreign = 4, 4 }, 1000, 0, false},
		{"one behind the last slot for the patient", func(g *Gate) { g.AtEngine = 8 }, 1000, time.Second, true},
		{"a slot is kept free", func(g *Gate) { g.AtEngine, g.Reserve = 6, 1 }, 1000, 0, true},
		{"all others are taken", func(g *Gate) { g.AtEngine, g.Reserve = 7, 1 }, 1000, 0, false},
		{"of the patient too", func(g *Gate) { g.AtEngine, g.Reserve = 7, 1 }, 1000, time.Minute, false},
		{"a third more prefill where slots are kept free", func(g *Gate) { g.Pending, g.Reserve = 390, 1 }, 1000, time.Minute, true},
		{"but no more", func(g *Gate) { g.Pending, g.Reserve = 391, 1 }, 1000, time.Minute, false},
		{"KV full", func(g *Gate) { g.KVUsed = Some(0.97) }, 1, 0, false},
		{"KV full with what was let in since", func(g *Gate) { g.Entered = 47_000 }, 1000, 0, false},
		{"KV full for the patient", func(g *Gate) { g.KVUsed = Some(1.0) }, 1, time.Second, true},
		{"an empty engine takes anything", func(g *Gate) { *g = Gate{Rate: 1, KVUsed: Some(1.0)} }, 1e6, 0, true},
	} {
		g := base
		c.change(&g)
		assert.Equal(t, c.want, g.Room(c.tokens, c.waited), c.name)
	}
}
