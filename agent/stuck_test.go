package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// C50: an engine that has work and stands still is suspect after a while; one that idles never is, a prompt has its time,
// and streams that move overrule the engine's numbers.
func TestStandstill(t *testing.T) {
	a, err := New(loopbackConfig("http://127.0.0.1:1"), Options{})
	require.NoError(t, err)
	now := time.Now()
	reading := func(running int, tokens float64) *engine.Reading {
		return &engine.Reading{Running: routing.Some(running), Waiting: routing.Some(0), GenerationTokens: routing.Some(tokens)}
	}
	var s standstillWatch
	step := func(rd *engine.Reading, load proxy.Load, seconds int) bool {
		for range seconds {
			now = now.Add(time.Second)
			a.setStuck(s.still(rd, load, now), load, false)
		}
		return a.own.is().stuck
	}
	busy := proxy.Load{Running: 1, Tokens: 5}
	assert.False(t, step(reading(0, 10), proxy.Load{Tokens: 5}, 600), "an idle engine")
	assert.False(t, step(reading(1, 10), busy, 29))
	assert.True(t, step(reading(1, 10), busy, 10))
	assert.NotZero(t, a.own.is().flags()&routing.FlagSuspect)
	assert.Contains(t, strings.Join(warnings(a), "\n"), "nothing has moved for 31s")
	assert.False(t, step(reading(1, 11), busy, 1), "it moves again")
	assert.Empty(t, warnings(a))

	for i := range 120 { // the page is frozen, but what it streams comes through here
		assert.False(t, step(reading(1, 11), proxy.Load{Running: 1, Tokens: uint64(6 + i)}, 1))
	}
	long := proxy.Load{Waiting: 1, Tokens: 125, PendingTokens: 60_000, PrefillRate: routing.Some(2000.0)}
	assert.False(t, step(reading(1, 12), long, 85), "a prompt of 30 s has twice its time")
	assert.True(t, step(reading(1, 12), long, 10))
	assert.Less(t, allowance(proxy.Load{PendingTokens: 1 << 40, PrefillRate: routing.Some(1.0)}), 6*time.Minute)

	a.setStuck(time.Hour, busy, true)
	assert.False(t, a.own.is().stuck, "an engine whose numbers move only when requests end")
}

func warnings(a *Agent) (out []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.warnings {
		out = append(out, w)
	}
	return out
}
