package choosing

import (
	"cmp"
	"flag"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

var (
	long  = flag.Bool("long", false, "1,500 arrivals a policy, three runs, all policies; without any flag a smoke run of 20 through ours that judges nothing but errors")
	count = flag.Int("arrivals", 0, "arrivals a policy instead")
	runs  = flag.Int("runs", 0, "runs of each policy instead")
	every = flag.Bool("all", false, "all policies also without -long")
)

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	harness.RemoveBinaries()
	os.Exit(code)
}

// policies are those that are compared. Agents of the others pass everything on at once, as their textbooks say.
var policies = []struct {
	name  string
	env   harness.Env // of the agents; nil: the test itself sends straight to the engines
	pick  func(*central, arrival) int
	short bool // runs in the short form too
}{
	{"grapevine", harness.Env{}, nil, true},
	{"round robin", harness.Env{"GRAPEVINE_POLICY": "round_robin", "GRAPEVINE_GATE": "off"}, nil, true},
	{"p2c on counts, central", nil, p2c, false},
	{"exact state, central", nil, exact, false},
}

// The choice of real agents is nearly as good as that of somebody who knows everything.
func TestChoosing(t *testing.T) {
	n, reps, judged := 20, 1, *long || *count > 0
	if *long {
		n, reps = 1500, 3
	}
	n, reps = cmp.Or(*count, n), cmp.Or(*runs, reps)
	all := *long || *every
	mean := map[string]time.Duration{}
	for _, p := range policies {
		if !all && !p.short || !judged && p.name != "grapevine" {
			continue
		}
		var means, p99s []time.Duration
		for rep := range reps {
			engineURLs, agentURLs, pids, stop := fleet(t, p.env)
			pick := func(a arrival) (string, func(), func()) { return agentURLs[a.entry], func() {}, func() {} }
			if p.pick != nil {
				pick = newCentral(engineURLs, p.pick).pick
			}
			r := play(t, p.name, load(t, n, uint64(rep+1)), pick, pids)
			stop()
			t.Logf("%-24s run %d: mean %6.1f ms, p99 %7.1f ms, %d errors, CPU %2.0f %% of two cores", p.name, rep+1,
				ms(r.mean()), ms(r.p99()), r.errors, 100*r.cpu)
			assert.Zero(t, r.errors, "%s: %v", p.name, r.last)
			means, p99s = append(means, r.mean()), append(p99s, r.p99())
		}
		slices.Sort(means)
		slices.Sort(p99s)
		mean[p.name] = means[len(means)/2]
		t.Logf("%-24s median of %d: mean %6.1f ms, p99 %7.1f ms", p.name, reps, ms(mean[p.name]), ms(p99s[len(p99s)/2]))
	}
	if !judged {
		return
	}
	ours := mean["grapevine"].Seconds()
	t.Logf("mean to first token: %.2f x round robin", ours/mean["round robin"].Seconds())
	assert.LessOrEqual(t, ours, 0.75*mean["round robin"].Seconds())
	if all {
		t.Logf("mean to first token: %.2f x exact state, %.2f x p2c on counts", ours/mean["exact state, central"].Seconds(),
			ours/mean["p2c on counts, central"].Seconds())
		assert.LessOrEqual(t, ours, 1.2*mean["exact state, central"].Seconds())
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
