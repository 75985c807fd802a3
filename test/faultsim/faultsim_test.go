package faultsim

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy/guard"
)

var (
	long  = flag.Bool("long", false, "run some hundred seeds, and each guard switched off")
	seeds = flag.Int("seeds", 0, "how many seeds; 0 = 5, with -long 300")
	seed  = flag.Uint64("seed", 0, "run this seed alone, and print its trace")
	first = flag.Uint64("first", 1, "the first seed")
)

// result is what a seed came to.
type result struct {
	bad      []string
	trace    []string
	outcomes map[string]int
	injected map[string]int
	causes   map[string]int
	longest  map[string]time.Duration
	orphaned int
}

// simulate carries a plan out in a bubble of its own.
func simulate(t *testing.T, p *plan) (res result) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, p)
		watchdog := time.AfterFunc(10*time.Minute, func() {
			panic(fmt.Sprintf("seed %d is not over after ten minutes of its time\n%s\n%s", p.seed, strings.Join(f.trace, "\n"), strings.Join(bubble(), "\n\n")))
		})
		defer watchdog.Stop()
		var work sync.WaitGroup
		for _, x := range p.faults {
			work.Go(func() {
				time.Sleep(x.at)
				f.inject(x)
			})
		}
		answers := make([]*answer, len(p.requests))
		for i := range p.requests {
			work.Go(func() {
				q := &p.requests[i]
				time.Sleep(q.at)
				a := f.send(q)
				f.say("%s at agent %d (stream %v, max %d): %s, status %d %s %v, %d bytes, %v", q.id, a.entry, q.stream, q.max, a.outcome(),
					a.status, a.reason, a.err, len(a.text), a.ended.Sub(a.began).Round(time.Millisecond))
				answers[i] = a
			})
		}
		work.Wait()
		time.Sleep(keepalive + 5*time.Second)
		f.checkAnswers(answers)
		f.checkRest()
		res.orphaned = f.checkRuns(answers)
		for _, h := range f.hosts {
			work.Go(func() { h.stop(false) })
		}
		work.Wait()
		f.engines()
		f.wg.Wait()
		time.Sleep(2 * time.Minute) // memberlist's goroutines end by timers
		f.checkEnd()
		res.bad, res.trace, res.injected = f.bad, f.trace, f.injected
		res.outcomes = map[string]int{}
		res.causes, res.longest = map[string]int{}, f.longest
		for _, a := range answers {
			res.outcomes[a.outcome()]++
			if a.errBody != "" {
				res.causes[a.cause()]++
			}
		}
	})
	return res
}

// show prints a seed's plan and trace.
func show(t *testing.T, p *plan, res result) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d agents, %s, policy %s, keys %v, loss %.2f, %d requests\n", p.seed, p.agents, p.dialect, p.policy, p.keyed, p.loss, len(p.requests))
	for _, x := range p.faults {
		fmt.Fprintf(&b, "%9.3f  %s\n", x.at.Seconds(), x)
	}
	b.WriteString("trace:\n" + strings.Join(res.trace, "\n"))
	t.Log(b.String())
}

// total adds up what seeds came to.
type total struct {
	seeds, failed, orphaned int
	outcomes, injected      map[string]int
	causes                  map[string]int
	longest                 map[string]time.Duration
	began                   time.Time
}

func (s *total) add(r result) {
	if s.outcomes == nil {
		s.outcomes, s.injected, s.causes, s.longest = map[string]int{}, map[string]int{}, map[string]int{}, map[string]time.Duration{}
	}
	s.seeds++
	if len(r.bad) > 0 {
		s.failed++
	}
	s.orphaned += r.orphaned
	for k, n := range r.outcomes {
		s.outcomes[k] += n
	}
	for k, n := range r.causes {
		s.causes[k] += n
	}
	for k, d := range r.longest {
		s.longest[k] = max(s.longest[k], d)
	}
	for k, n := range r.injected {
		s.injected[k] += n
	}
}

func (s *total) String() string {
	list := func(m map[string]int) string {
		var out []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			out = append(out, fmt.Sprintf("%s %d", k, m[k]))
		}
		return strings.Join(out, ", ")
	}
	return fmt.Sprintf("%d seeds in %v, %d with violations, %d runs orphaned\nrequests: %s\nfaults: %s\nerrors: %s\nlongest waits, where the network worked: first content %v, gap %v", s.seeds, time.Since(s.began).Round(time.Second),
		s.failed, s.orphaned, list(s.outcomes), list(s.injected), list(s.causes), s.longest["first"].Round(time.Millisecond), s.longest["gap"].Round(time.Millisecond))
}

func TestSeeds(t *testing.T) {
	n := *seeds
	switch {
	case n > 0:
	case *long:
		n = 300
	default:
		n = 5
	}
	if *seed > 0 {
		*first, n, verbose = *seed, 1, true
	}
	sum := total{began: time.Now()}
	for i := range uint64(n) {
		p := newPlan(*first + i)
		res := simulate(t, p)
		sum.add(res)
		if len(res.bad) > 0 {
			t.Errorf("seed %d breaks %d invariants:\n  %s", p.seed, len(res.bad), strings.Join(res.bad, "\n  "))
		}
		if *seed > 0 || len(res.bad) > 0 && sum.failed <= 3 {
			show(t, p, res)
		}
	}
	t.Log(sum.String())
}

// A seed is a plan, always the same.
func TestPlan(t *testing.T) {
	once, again := newPlan(42), newPlan(42)
	require.Equal(t, once, again)
	require.NotEqual(t, once, newPlan(43))
}

// A guard that is switched off is found to be missing.
func TestGuards(t *testing.T) {
	if !*long {
		t.Skip("with -long")
	}
	for _, g := range []guard.Guard{guard.Claim, guard.Ticket, guard.Replay, guard.HangUp} {
		t.Run(g.String(), func(t *testing.T) {
			defer g.SwitchOff()()
			for i := range uint64(500) {
				if res := simulate(t, newPlan(*first+i)); len(res.bad) > 0 {
					t.Logf("seed %d: %s", *first+i, res.bad[0])
					return
				}
			}
			t.Error("500 seeds find nothing")
		})
	}
}

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(m.Run())
}
