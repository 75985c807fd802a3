package chaos

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// fleet is some replicas under load, something that breaks, and what came of it.
type fleet struct {
	t       *testing.T
	s       *harness.Stage
	args    []string // of all engines
	engines []*harness.Engine
	agents  []*harness.Agent
	oracle  *harness.Engine // says what an undisturbed engine says
	load    *load
	broke   time.Time
	healed  time.Time
	counted map[string]float64 // by metric, of agents that are gone
	stopped map[int]bool       // engines whose journal may be late: what they ran cannot be told
}

// engineArgs make an engine with 16 slots that is slow enough for two cores.
var engineArgs = []string{"-decode-step", "15ms", "-slots", "16", "-prefill-rate", "20000"}

func newFleet(t *testing.T, n int, args []string, env ...harness.Env) *fleet {
	t.Helper()
	f := &fleet{t: t, s: harness.New(t), args: append(slices.Clone(engineArgs), args...), counted: map[string]float64{}, stopped: map[int]bool{}}
	f.s.Size(n)
	for i := range n {
		f.engines = append(f.engines, f.s.FakeEngine(i+1, f.args...))
	}
	f.oracle = f.s.FakeEngine(100, "-speed", "1000", "-slots", "64")
	for i := range n {
		e := harness.Env{}
		for _, x := range env {
			for k, v := range x {
				e[k] = strings.ReplaceAll(v, "{i}", fmt.Sprint(i))
			}
		}
		f.agents = append(f.agents, f.s.Agent(i+1, f.engines[i].URL, e))
	}
	for _, a := range f.agents {
		a.WaitReady(20 * time.Second)
		a.WaitMembers(n, 20*time.Second)
	}
	return f
}

// dur is a scenario's time: as given with -long, a third of it otherwise.
func dur(d time.Duration) time.Duration {
	if *long {
		return d
	}
	return d / 3
}

// entries are the addresses of the agents with these indexes; all if none is given.
func (f *fleet) entries(which ...int) func() []string {
	var list []string
	for i, a := range f.agents {
		if len(which) == 0 || slices.Contains(which, i) {
			list = append(list, a.URL)
		}
	}
	return func() []string { return list }
}

// run puts the groups to work, breaks something, heals it, and returns when all is done.
func (f *fleet) run(groups []*group, breaks, heals func()) *result {
	f.t.Helper()
	f.load = startLoad(groups...)
	defer f.load.stop()
	time.Sleep(dur(2 * time.Second))
	f.broke = time.Now()
	breaks()
	f.healed = time.Now()
	if heals != nil {
		heals()
	}
	time.Sleep(dur(4 * time.Second))
	r := &result{f: f, replies: f.load.end()}
	r.judge()
	return r
}

// restartEngine starts a dead engine again.
func (f *fleet) restartEngine(i int) {
	f.t.Helper()
	<-f.engines[i].Done()
	f.engines[i] = f.s.FakeEngine(i+1, f.args...)
	f.agents[i].WaitReady(30 * time.Second)
}

// keep remembers an agent's counters before it goes.
func (f *fleet) keep(a *harness.Agent) {
	for _, m := range []string{"grapevine_retries_total", "grapevine_continues_total"} {
		f.counted[m] += a.Metric(m)
	}
}

func (f *fleet) sum(metric string) float64 {
	n := f.counted[metric]
	for _, a := range f.agents {
		if a.Alive() {
			n += a.Metric(metric)
		}
	}
	return n
}

// result is what clients saw and engines did.
type result struct {
	f         *fleet
	replies   []reply
	eligible  int
	noContent []reply // failed before any content
	cut       []reply // failed behind content
	cutText   []reply // … although it could have been continued
	wrong     []reply // whole by its looks, but not the text of an undisturbed engine
	retried   float64
	continued float64
	twice     []string
	orphans   int
	during    time.Duration // p99 TTFT of what started while broken
	after     time.Duration // … from then on
	normal    time.Duration // from the break to the last request that was not served as before
}

func (r *result) judge() {
	f := r.f
	f.t.Helper()
	var before, during, after []time.Duration
	for _, q := range r.replies {
		if q.eligible {
			r.eligible++
		}
		switch {
		case q.err == nil:
		case q.text == "":
			r.noContent = append(r.noContent, q)
		default:
			r.cut = append(r.cut, q)
			if q.eligible {
				r.cutText = append(r.cutText, q)
			}
		}
		if !q.stream || q.ttft == 0 {
			continue
		}
		switch {
		case q.start.Before(f.broke):
			if q.start.Add(q.ttft).Before(f.broke) {
				before = append(before, q.ttft)
			}
		case q.start.Before(f.healed):
			during = append(during, q.ttft)
		default:
			after = append(after, q.ttft)
		}
	}
	r.during, r.after = quantile(during, 0.99), quantile(after, 0.99)
	usual := max(2*quantile(before, 0.99), 100*time.Millisecond)
	for _, q := range r.replies {
		if q.start.Add(q.total).After(f.broke) && (q.err != nil || q.ttft > usual) {
			r.normal = max(r.normal, q.start.Add(max(q.ttft, min(q.total, usual))).Sub(f.broke))
		}
	}
	r.retried, r.continued = f.sum("grapevine_retries_total"), f.sum("grapevine_continues_total")
	r.twice, r.orphans = twice(f.s.Runs(), f.stopped)
	// What was whole must be, to the character, what an undisturbed engine says. Asking for all would take too long.
	checked := 0
	for i := len(r.replies) - 1; i >= 0 && checked < 200; i-- {
		q := r.replies[i]
		if q.err != nil || q.start.Add(q.total).Before(f.broke) {
			continue
		}
		checked++
		want, _, err := stream(context.Background(), f.oracle.URL, ask{eligible: true, stream: true, prompt: q.prompt, tokens: q.tokens}.body(), nothing)
		require.NoError(f.t, err)
		if want != q.text {
			r.wrong = append(r.wrong, q)
		}
	}
}

func quantile(list []time.Duration, p float64) time.Duration {
	if len(list) == 0 {
		return 0
	}
	slices.Sort(list)
	return list[min(len(list)-1, int(p*float64(len(list))))]
}

// twice finds requests whose runs were open at two engines at the same time for over a second. Runs whose end cannot be told,
// at engines that were stopped or killed, are counted apart where a second one follows.
func twice(runs []harness.Run, stopped map[int]bool) (list []string, orphans int) {
	of := map[string][]harness.Run{}
	for _, r := range runs {
		if strings.HasPrefix(r.RequestID, "chaos-") {
			of[r.RequestID] = append(of[r.RequestID], r)
		}
	}
	end := func(r harness.Run) int64 {
		if r.Gone != 0 && (r.End == 0 || r.Gone < r.End) {
			return r.Gone
		}
		return r.End
	}
	for id, same := range of {
		slices.SortFunc(same, func(a, b harness.Run) int { return int(a.Received - b.Received) })
		for i := 1; i < len(same); i++ {
			for _, a := range same[:i] {
				b := same[i]
				untold := end(a) == 0 || end(b) == 0
				for n := range stopped {
					untold = untold || a.Engine == fmt.Sprintf("engine%d.journal", n+1) || b.Engine == fmt.Sprintf("engine%d.journal", n+1)
				}
				if untold {
					orphans++
					continue
				}
				if both := time.Duration(min(end(a), end(b)) - b.Received); both > time.Second {
					list = append(list, fmt.Sprintf("%s for %v at %s (%s) and %s (%s)", id, both, a.Engine, a.Outcome, b.Engine, b.Outcome))
				}
			}
		}
	}
	return list, orphans
}

// table collects the rows of all scenarios and is printed at the end.
var table [][]string

var columns = []string{"scenario", "sent", "eligible", "failed", "cut", "cut, eligible", "wrong", "retried", "continued", "twice", "orphaned", "p99 TTFT in", "after", "normal after"}

// row adds the scenario's row and prints it.
func (r *result) row(name string) {
	r.f.t.Helper()
	ms := func(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
	row := []string{name, fmt.Sprint(len(r.replies)), fmt.Sprintf("%.0f %%", 100*float64(r.eligible)/float64(max(1, len(r.replies)))), fmt.Sprint(len(r.noContent)),
		fmt.Sprint(len(r.cut)), fmt.Sprint(len(r.cutText)), fmt.Sprint(len(r.wrong)), fmt.Sprintf("%.0f", r.retried), fmt.Sprintf("%.0f", r.continued),
		fmt.Sprint(len(r.twice)), fmt.Sprint(r.orphans), ms(r.during), ms(r.after), fmt.Sprintf("%.1f s", r.normal.Seconds())}
	table = append(table, row)
	r.f.t.Log(format([][]string{columns, row}))
	for _, list := range []struct {
		what string
		of   []reply
	}{{"failed", r.noContent}, {"cut", r.cut}, {"wrong", r.wrong}} {
		for i, q := range list.of {
			if i == 5 {
				break
			}
			r.f.t.Logf("%s: %s chaos-%d at %s, eligible %v, status %d, %d bytes, %v, %d tries: %v", list.what, q.start.Format("15:04:05.000"), q.n, q.entry, q.eligible, q.status, len(q.text), q.total.Round(time.Millisecond), q.tries, q.err)
		}
	}
	if len(r.twice) > 0 {
		r.f.t.Log(strings.Join(r.twice, "\n"))
	}
}

// sound is what holds in every scenario: nothing ran twice, and no answer that looks whole is not.
func (r *result) sound() {
	r.f.t.Helper()
	assert.Empty(r.f.t, r.twice, "ran twice")
	assert.Empty(r.f.t, r.wrong, "text that no engine says")
	assert.Greater(r.f.t, len(r.replies), 20, "hardly any traffic")
}

func format(rows [][]string) string {
	width := make([]int, len(columns))
	for _, row := range rows {
		for i, c := range row {
			width[i] = max(width[i], len(c))
		}
	}
	var b bytes.Buffer
	for _, row := range rows {
		b.WriteString("\n")
		for i, c := range row {
			if i == 0 {
				fmt.Fprintf(&b, "%-*s", width[i], c)
			} else {
				fmt.Fprintf(&b, "  %*s", width[i], c)
			}
		}
	}
	return b.String()
}

// printTable prints all rows; for TestMain.
func printTable() {
	if len(table) > 0 {
		fmt.Fprintln(os.Stdout, format(append([][]string{columns}, table...)))
	}
}
