package demo

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestArrivalsAreSeeded(t *testing.T) {
	a, b := arrivals(1, 50, 10*time.Second, 4), arrivals(1, 50, 10*time.Second, 4)
	assert.Equal(t, a, b)
	assert.NotEqual(t, a, arrivals(2, 50, 10*time.Second, 4))
	assert.InDelta(t, 500, len(a), 70, "Poisson: within three standard deviations")
	entries := map[int]int{}
	for i, x := range a {
		entries[x.entry]++
		assert.True(t, i == 0 || x.at >= a[i-1].at)
		assert.GreaterOrEqual(t, x.prompt, promptMin)
		assert.LessOrEqual(t, x.prompt, promptMax)
		assert.Len(t, x.text(), 4*x.prompt)
	}
	assert.Len(t, entries, 4)
	assert.NotEqual(t, a[0].text()[:32], a[1].text()[:32], "no prefix in common")
}

func TestCapacity(t *testing.T) {
	p := enginesim.DefaultParams()
	full := capacity(p, 1)
	assert.Greater(t, full, 1.0)
	p.Speed = 0.5
	assert.InEpsilon(t, full/2, capacity(p, 1), 0.01)
}

func TestSummary(t *testing.T) {
	var r results
	for i := range 100 {
		r.add(time.Duration(100-i)*time.Millisecond, nil)
	}
	r.add(0, context.Canceled)
	mean, p50, p99 := r.summary()
	assert.Equal(t, 50.5, mean)
	assert.Equal(t, 50.0, p50)
	assert.Equal(t, 99.0, p99)
	_, answered, failed := r.counts()
	assert.Equal(t, 100, answered)
	assert.Equal(t, 1, failed)
}

func TestResultNames(t *testing.T) {
	b, err := json.Marshal(Result{})
	require.NoError(t, err)
	assert.JSONEq(t, `{"replicas":0,"requests":0,"errors":0,"forwarded_share":0,"ttft_mean_ms":0,"ttft_p50_ms":0,"ttft_p99_ms":0,
		"round_robin":{"ttft_mean_ms":0,"ttft_p50_ms":0,"ttft_p99_ms":0},"members":0,"report_age_p50_ms":0,"status_urls":null}`, string(b))
}

// The whole demo, short: no request fails, and requests move. How much faster it is needs the full 15 s; see .ci/run.
func TestDemo(t *testing.T) {
	res, err := Run(t.Context(), Config{Replicas: 3, Slow: 0.5, Duration: 3 * time.Second, Seed: 1})
	require.NoError(t, err)
	assert.Zero(t, res.Errors)
	assert.Equal(t, 3, res.Members)
	assert.Greater(t, res.Requests, 20)
	assert.Greater(t, res.ForwardedShare, 0.1)
	assert.Less(t, res.ForwardedShare, 1.0)
	assert.Len(t, res.StatusURLs, 3)
	assert.Positive(t, res.Mean)
	assert.Positive(t, res.RoundRobin.P99)
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []Config{{Slow: 1, Duration: 1}, {Replicas: 1, Duration: 1}, {Replicas: 1, Slow: 1}} {
		_, err := Run(t.Context(), c)
		assert.Error(t, err)
	}
}
