package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// demo is the object that `grapevine demo --json` prints; its names are a contract.
type demo struct {
	Replicas, Requests, Errors, Members int
	ForwardedShare                      float64 `json:"forwarded_share"`
	ttft
	RoundRobin     ttft     `json:"round_robin"`
	ReportAgeP50MS float64  `json:"report_age_p50_ms"`
	StatusURLs     []string `json:"status_urls"`
}

type ttft struct {
	Mean float64 `json:"ttft_mean_ms"`
	P50  float64 `json:"ttft_p50_ms"`
	P99  float64 `json:"ttft_p99_ms"`
}

// runDemo runs the demo in a process of its own, which must exit 0 with one JSON object on stdout and nothing else there.
func runDemo(t *testing.T, args ...string) (d demo) {
	t.Helper()
	limit, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(limit, harness.Build(t, "./cmd/grapevine"), append([]string{"demo", "--duration", "15s", "--json"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	t.Logf("%v: %s", time.Since(began).Round(time.Second), bytes.TrimSpace(stdout.Bytes()))
	require.NoError(t, err, "%s", &stderr)
	dec := json.NewDecoder(&stdout)
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&d))
	require.False(t, dec.More(), "more than one object on stdout")
	assert.Zero(t, d.Errors)
	assert.Equal(t, 4, d.Replicas)
	assert.Equal(t, 4, d.Members)
	assert.Greater(t, d.Requests, 100)
	assert.LessOrEqual(t, d.ReportAgeP50MS, 300.0)
	assert.Len(t, d.StatusURLs, 4)
	assert.Positive(t, d.P50)
	assert.Positive(t, d.RoundRobin.P50)
	return d
}

// One replica of four at half speed: round robin keeps feeding it, we do not.
func TestDemo(t *testing.T) {
	longOnly(t)
	d := runDemo(t)
	assert.GreaterOrEqual(t, d.ForwardedShare, 0.3)
	assert.LessOrEqual(t, d.ForwardedShare, 0.95)
	assert.LessOrEqual(t, d.P99, 0.8*d.RoundRobin.P99, "p99")
}

// All replicas equal: the case in which choosing by gossiped counts does harm.
func TestDemoEqual(t *testing.T) {
	longOnly(t)
	d := runDemo(t, "--slow", "1")
	assert.LessOrEqual(t, d.Mean, 1.2*d.RoundRobin.Mean, "mean")
}
