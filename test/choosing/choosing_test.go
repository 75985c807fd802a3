package choosing

import (
	"cmp"
	"flag"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

var (
	long  = flag.Bool("long", false, "1,500 arrivals a policy, three runs, all policies")
	count = flag.Int("arrivals", 0, "arrivals a policy instead")
	runs  = flag.Int("runs", 0, "runs of each policy instead")
	first = flag.Int("first", 1, "number of the first run: each plays other arrivals")
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
	name, program string
	env           harness.Env
	short         bool // runs in the short form too
}{
	{"grapevine", "./cmd/grapevine", nil, true},
	{"exact state", "./test/testagent", harness.Env{"TESTAGENT_EXACT": strconv.Itoa(harness.EnginePort), "GRAPEVINE_GATE": "off"}, false},
	{"round robin", "./cmd/grapevine", harness.Env{"GRAPEVINE_POLICY": "round_robin", "GRAPEVINE_GATE": "off"}, true},
	{"p2c on counts", "./cmd/grapevine", harness.Env{"GRAPEVINE_POLICY": "p2c", "GRAPEVINE_GATE": "off"}, false},
}

// beside is how many policies play at the same time: more would make the machine busy.
const beside = 2

// longOnly skips what plays real processes for a minute and more.
func longOnly(t *testing.T) {
	t.Helper()
	if !*long && *count == 0 {
		t.Skip("runs with -long or -arrivals")
	}
}

// The choice of real agents is nearly as good as that of somebody who knows everything. All policies play the same arrivals,
// two at a time, each with engines and agents of its own, so that what else goes on in the machine hits both.
func TestChoosing(t *testing.T) {
	longOnly(t)
	n, reps := cmp.Or(*count, 1500), cmp.Or(*runs, 1)
	if *long {
		reps = cmp.Or(*runs, 3)
	}
	all := *long || *every
	means, p99s := map[string][]time.Duration{}, map[string][]time.Duration{}
	chosen := policies[:0:0]
	for _, p := range policies {
		if all || p.short {
			chosen = append(chosen, p)
		}
	}
	for run := *first; run < *first+reps; run++ {
		arrivals := load(t, n, uint64(run))
		for some := range slices.Chunk(chosen, beside) {
			var list []*fleet
			for _, p := range some {
				list = append(list, newFleet(t, p.name, p.program, p.env))
			}
			cpu := play(list, arrivals)
			for _, f := range list {
				f.stop()
				t.Logf("run %d  %-14s mean %6.1f ms, p99 %7.1f ms, %d errors", run, f.name, ms(f.mean()), ms(f.p99()), f.errors)
				assert.Zero(t, f.errors, "%s: %v", f.name, f.last)
				means[f.name], p99s[f.name] = append(means[f.name], f.mean()), append(p99s[f.name], f.p99())
			}
			t.Logf("run %d  %d arrivals to each of %d fleets, CPU %.0f %% of all cores", run, n, len(list), 100*cpu)
			if *long {
				assert.LessOrEqual(t, cpu, 0.6, "the machine's own delays count")
			}
		}
	}
	median := func(list []time.Duration) time.Duration {
		slices.Sort(list)
		return list[len(list)/2]
	}
	ours := median(means["grapevine"]).Seconds()
	for _, p := range policies {
		if len(means[p.name]) > 0 {
			m := median(means[p.name])
			t.Logf("median of %d: %-14s mean %6.1f ms, p99 %7.1f ms; ours is %.2f x", reps, p.name, ms(m), ms(median(p99s[p.name])), ours/m.Seconds())
		}
	}
	assert.LessOrEqual(t, ours, 0.75*median(means["round robin"]).Seconds())
	if all {
		assert.LessOrEqual(t, ours, 1.2*median(means["exact state"]).Seconds())
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
