package choosing

import (
	"context"
	"flag"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/sim"
)

var traces = flag.String("traces", "", "folder of real traces for TestWorth")

// What the parts are worth on real traces, simulated with the product's own code: 16 replicas at 85 % load, mean time to first
// token as a multiple of the full policy's, over two seeds. Each bar stands beside its figure.
//
//	go test ./test/choosing -run TestWorth -v -traces FOLDER
func TestWorth(t *testing.T) {
	if *traces == "" {
		t.Skip("needs -traces FOLDER, with azure23-conv, agents-a, mooncake-conv-1, mooncake-synth and servegen-mlarge")
	}
	read := func(name string) *sim.Trace {
		tr, err := sim.ReadTraceFile(filepath.Join(*traces, name+".jsonl.gz"))
		require.NoError(t, err)
		return tr
	}
	mean := func(tr *sim.Trace, c sim.Config, policy string) (sum float64) {
		const seeds = 2
		c.Trace, c.Policy = tr, policy
		for seed := range uint64(seeds) {
			c.Seed = seed + 1
			r, err := sim.Run(context.Background(), c)
			require.NoError(t, err)
			sum += r.TTFT.Mean / seeds
		}
		return sum
	}
	usual := sim.Config{Load: 0.85, Duration: 120 * time.Second}
	bursts := sim.Config{Load: 0.7, Duration: 120 * time.Second, Arrivals: sim.Arrivals{Mode: "gamma", CV: 4}}
	for _, c := range []struct {
		trace         string
		cfg           sim.Config
		policy        string // compared with …
		than          string // … this one
		atLeast, most float64
	}{
		{"azure23-conv", usual, "auto", "exact", 0, 1.10},
		{"agents-a", usual, "auto", "exact", 0, 1.10},
		{"mooncake-conv-1", usual, "auto", "exact", 0, 1.10},
		{"mooncake-synth", usual, "auto", "exact", 0, 1.10},
		{"servegen-mlarge", usual, "auto", "exact", 0, 1.10},
		{"azure23-conv", usual, "auto/no-ask", "auto", 1.04, 0},
		{"agents-a", usual, "auto/no-ask", "auto", 1.09, 0},
		{"agents-a", usual, "auto/ask=3/no-digest", "auto/ask=3", 1.20, 0},
		{"mooncake-conv-1", usual, "auto/ask=3/no-digest", "auto/ask=3", 1.05, 0},
		{"azure23-conv", bursts, "auto/no-gate", "auto", 1.12, 0},
		{"azure23-conv", bursts, "auto/no-steal", "auto", 0, 0},
	} {
		tr := read(c.trace)
		than := mean(tr, c.cfg, c.than)
		got := mean(tr, c.cfg, c.policy)
		x := got / than
		t.Logf("%-16s load %.2f %-22s %7.1f ms, %-10s %7.1f ms: %.3f (at least %.2f, at most %.2f; 0 = only printed)",
			c.trace, c.cfg.Load, c.policy, 1e3*got, c.than, 1e3*than, x, c.atLeast, c.most)
		assert.GreaterOrEqual(t, x, c.atLeast, "%s: %s", c.trace, c.policy)
		if c.most > 0 {
			assert.LessOrEqual(t, x, c.most, "%s: %s", c.trace, c.policy)
		}
	}
}
