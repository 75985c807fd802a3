package sim

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

var update = flag.Bool("update", false, "write the golden files anew")

func workload(t testing.TB, name string) *Trace {
	w, err := Workload(name)
	require.NoError(t, err)
	return w
}

func run(t testing.TB, c Config) Result {
	t.Helper()
	r, err := Run(context.Background(), c)
	require.NoError(t, err)
	return r
}

// troubled is a small run with everything that can happen.
func troubled(t testing.TB) Config {
	return Config{Trace: workload(t, "agents"), Replicas: 6, Load: 0.8, Duration: 40 * time.Second, Zones: 3, Loss: 0.2,
		Arrivals: Arrivals{Mode: "gamma", CV: 3}, Kill: Outage{10 * time.Second, 20 * time.Second}, LoseZone: Outage{At: 25 * time.Second, Back: 30 * time.Second},
		Slow: Slowdown{At: 5 * time.Second, End: 15 * time.Second, Factor: 3}, Speeds: []float64{1, 1, 0.7}}
}

func TestDeterministic(t *testing.T) {
	c := troubled(t)
	a := run(t, c)
	assert.Equal(t, a, run(t, c))
	c.Seed = 2
	assert.NotEqual(t, a.TTFT, run(t, c).TTFT)
}

// Every request ends once, and when all have ended nobody counts anything any more.
func TestNothingIsLost(t *testing.T) {
	for _, policy := range []string{"auto", "auto/no-gate", "auto/no-ask", "auto/ask=2/no-digest", "p2c", "round_robin", "least_tokens", "consistent_hash", "exact"} {
		c := troubled(t)
		c.Policy = policy
		s, err := newSim(c)
		require.NoError(t, err)
		require.NoError(t, s.loop(context.Background()))
		assert.Equal(t, s.cfg.Requests, s.ended, policy)
		n := &s.counts
		assert.Equal(t, s.cfg.Requests, n.Done+n.Failed, policy)
		assert.Equal(t, n.Cut, n.Failed, "%s: only answers whose entry died may be lost", policy)
		assert.Positive(t, n.Cut, policy)
		assert.Positive(t, n.Continued, policy)
		assert.Positive(t, n.Retried, policy)
		for _, r := range s.live {
			assert.True(t, r == nil || r == s.next)
		}
		for _, a := range s.agents {
			require.True(t, a.alive, "all came back")
			assert.Equal(t, []int{0, 0, 0, 0, 0}, []int{a.account.running, a.account.waiting, a.account.pending, len(a.held), a.heldTokens}, policy)
			x := a.engine.Load()
			assert.Zero(t, x.Running+x.Waiting+x.Pending, policy)
			for _, p := range a.peers {
				assert.Equal(t, []int{0, 0}, []int{p.Inflight(), p.InflightTokens()}, policy)
			}
		}
	}
}

// A short trace that everybody can check by hand: one replica, one request at a time.
func TestOneRequest(t *testing.T) {
	tr := &Trace{Name: "one", Rows: []Row{{Prompt: 1000, Output: 11}}}
	p := enginesim.Rates(10_000, 20*time.Millisecond, 4)
	r := run(t, Config{Trace: tr, Engine: p, Replicas: 1, Rate: 0.1, Capacity: 1, Requests: 20, Warm: -1})
	assert.InDelta(t, 0.100, r.TTFT.P50, 1e-6, "1,000 tokens at 10,000 a second")
	assert.InDelta(t, 0.020, r.PerToken.P50, 1e-6)
	assert.Equal(t, 1.0, r.Good)
	assert.Equal(t, Counts{Done: 20, Steps: r.Counts.Steps}, r.Counts, "nobody is asked, nothing is held or forwarded")
}

func TestNoAnswerInTime(t *testing.T) {
	c := Config{Trace: workload(t, "chat"), Replicas: 4, Load: 0.8, Duration: 20 * time.Second, Hop: 3 * time.Millisecond}
	r := run(t, c)
	assert.Positive(t, r.Counts.Asked)
	assert.Zero(t, r.Counts.Questions, "6 ms there and back are more than the 5 ms that a request waits")
	c.Hop = 2 * time.Millisecond
	assert.Positive(t, run(t, c).Counts.Questions)
}

func TestSwitches(t *testing.T) {
	c := Config{Trace: workload(t, "chat"), Replicas: 4, Load: 0.9, Duration: 20 * time.Second}
	r := run(t, c)
	assert.Positive(t, r.Counts.Held)
	assert.Positive(t, r.Counts.Stolen)
	c.Steal = Off
	r = run(t, c)
	assert.Positive(t, r.Counts.Held)
	assert.Zero(t, r.Counts.Stolen+r.Counts.Pulls)
	c.Gate = Off
	assert.Zero(t, run(t, c).Counts.Held)
	c.Ask = new(0)
	assert.Zero(t, run(t, c).Counts.Asked)
	c.Policy = "local"
	assert.Zero(t, run(t, c).Counts.Forwarded)
}

// What the parts are worth, on the built-in workloads; the bars are those for the real traces, with some room.
func TestWorth(t *testing.T) {
	if testing.Short() {
		t.Skip("several seconds")
	}
	mean := func(c Config) float64 {
		sum := 0.0
		for seed := range uint64(2) {
			c.Seed = seed + 1
			sum += run(t, c).TTFT.Mean / 2
		}
		return sum
	}
	for _, name := range []string{"chat", "agents"} {
		c := Config{Trace: workload(t, name), Load: map[string]float64{"chat": 0.85, "agents": 0.55}[name], Duration: 50 * time.Second}
		full := mean(c)
		x := c
		x.Policy = "exact"
		assert.LessOrEqual(t, full, 1.20*mean(x), "%s: exact-state twin", name)
		x.Policy = "auto/no-ask"
		assert.Greater(t, mean(x), 1.03*full, "%s: without asking", name)
		x.Policy = "round_robin/no-gate"
		assert.Greater(t, mean(x), 1.25*full, "%s: round robin", name)
		if name == "agents" {
			x.Policy = "auto/ask=3"
			three := mean(x)
			x.Policy = "auto/ask=3/no-digest"
			assert.Greater(t, mean(x), 1.20*three, "without the digest")
			continue
		}
		x = c
		x.Arrivals, x.Load = Arrivals{Mode: "gamma", CV: 4}, 0.7
		burst := mean(x)
		x.Policy = "auto/no-gate"
		assert.Greater(t, mean(x), 1.12*burst, "bursts without gate and stealing")
	}
}

// A fleet that begins with cold caches under a load that only warm ones can carry gets warm, with the gate nearly as well as
// without: what is held counts as cached soon.
func TestColdFleet(t *testing.T) {
	mean := func(policy string) (sum float64) {
		for seed := range uint64(3) {
			sum += run(t, Config{Trace: workload(t, "agents"), Load: 0.85, Duration: 40 * time.Second, Policy: policy, Seed: seed + 1}).TTFT.Mean / 3
		}
		return sum
	}
	auto, off := mean("auto"), mean("auto/no-gate")
	t.Logf("mean to first token %.0f ms, gate off %.0f ms", 1e3*auto, 1e3*off)
	assert.Less(t, off, 0.5)
	assert.LessOrEqual(t, auto, 1.5*off)
}

// The golden file holds the figures of small runs, so that a change of routing shows.
func TestGolden(t *testing.T) {
	var b strings.Builder
	for _, name := range []string{"chat", "agents"} {
		for _, policy := range []string{"auto", "auto/no-ask", "auto/no-gate", "auto/no-steal", "p2c", "round_robin", "exact"} {
			r := run(t, Config{Trace: workload(t, name), Replicas: 8, Load: map[string]float64{"chat": 0.85, "agents": 0.4}[name], Duration: 20 * time.Second, Policy: policy})
			fmt.Fprintf(&b, "%-6s %-14s n %d ttft %.0f ms p99 %.0f per token %.1f good %.3f hit %.2f busy %.2f forwarded %d asked %d held %d stolen %d\n", name, policy,
				r.Requests, 1e3*r.TTFT.Mean, 1e3*r.TTFT.P99, 1e3*r.PerToken.Mean, r.Good, r.HitRate, r.Busy, r.Counts.Forwarded, r.Counts.Asked, r.Counts.Held, r.Counts.Stolen)
		}
	}
	const path = "testdata/golden.txt"
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(b.String()), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, string(want), b.String(), "if the change is meant: go test ./agent/sim -run Golden -update")
}

func TestConfigErrors(t *testing.T) {
	chat := workload(t, "chat")
	for want, c := range map[string]Config{
		"no trace":               {},
		"must be 1 to 512":       {Trace: chat, Replicas: 2000},
		"unknown policy":         {Trace: chat, Policy: "best"},
		"unknown switch":         {Trace: chat, Policy: "auto/fast"},
		"0 to 1":                 {Trace: chat, Loss: 2},
		"at least two":           {Trace: chat, LoseZone: Outage{At: time.Second}},
		"speed 0":                {Trace: chat, Speeds: []float64{0}},
		"coefficient":            {Trace: chat, Arrivals: Arrivals{Mode: "gamma"}},
		"out of range":           {Trace: chat, Rate: -1},
		"20 zones":               {Trace: chat, Zones: 20},
		"slow by 0":              {Trace: chat, Slow: Slowdown{At: time.Second}},
		"at least 1 ms":          {Trace: chat, GossipAge: time.Nanosecond},
		"slots must be at least": {Trace: chat, Engine: enginesim.Params{Slots: -1}},
	} {
		_, err := Run(context.Background(), c)
		assert.ErrorContains(t, err, want)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := Run(ctx, Config{Trace: chat})
	assert.ErrorIs(t, err, context.Canceled)
}

// The seeds' own example: 20,000 requests/s, 500 a replica, 70 % utilisation, three zones.
func TestPaper(t *testing.T) {
	p := NewPaper(20_000, 500, 100, 3)
	assert.Equal(t, 50_000.0, p.Tokens)
	assert.Equal(t, 40.0, p.Bare)
	assert.Equal(t, []int{58, 59, 86}, []int{p.Headroom, p.NPlusOne, p.Zones}, "57.1, one more, times 1.5")
	assert.Zero(t, NewPaper(1, 1, 1, 1).Zones)
}

func TestFind(t *testing.T) {
	c := Config{Trace: workload(t, "chat"), Rate: 40, Duration: 30 * time.Second, SLO: SLO{TTFT: time.Second}}
	f, err := Find(context.Background(), c, 0.99)
	require.NoError(t, err)
	for _, r := range f.Tried {
		assert.Equal(t, r.Replicas >= f.Replicas, r.Served >= 0.99, r.Replicas)
	}
	assert.InDelta(t, f.Paper.Bare, f.Replicas, 2)
	c.SLO.TTFT = time.Nanosecond
	c.Rate, c.Duration = 1, 5*time.Second
	f, err = Find(context.Background(), c, 0.99)
	require.NoError(t, err)
	assert.Zero(t, f.Replicas, "nobody can")
	_, err = Find(context.Background(), Config{Trace: c.Trace}, 0.99)
	assert.ErrorContains(t, err, "rate must be given")
}

// BenchmarkRun is one request of a fleet of 64.
func BenchmarkRun(b *testing.B) {
	b.ReportAllocs()
	r := run(b, Config{Trace: workload(b, "chat"), Replicas: 64, Requests: max(100, b.N)})
	b.ReportMetric(float64(r.Counts.Steps)/float64(r.Counts.Done), "steps/op")
}
