//go:build linux

package gossip

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// ten starts ten agents on loopback.
func ten(t *testing.T) (*harness.Stage, []*harness.Agent) {
	t.Helper()
	s := harness.New(t)
	var urls []string
	for i := range 10 {
		urls = append(urls, s.FakeEngine(i+1, engines...).URL)
	}
	agents := s.Mesh(urls)
	harness.Eventually(t, 15*time.Second, "fresh records", func() bool { return fresh(agents) })
	return s, agents
}

// age is how old the record of one agent is for another, and whether it counts as usable there.
func age(a *harness.Agent, node string) (age time.Duration, state string) {
	r, err := a.Report()
	if err != nil {
		return 0, ""
	}
	for _, p := range r.Peers {
		if p.Node == node && p.AgeMS != nil {
			return time.Duration(*p.AgeMS * float64(time.Millisecond)), p.State
		}
	}
	return 0, "gone"
}

// What happens to one of ten: it is stopped for 2 s five times, for 5 s and for 30 s, ends by SIGTERM and by SIGKILL, under load
// that enters elsewhere.
func TestProcesses(t *testing.T) {
	longOnly(t)
	s, agents := ten(t)
	victim, others := agents[9], agents[:9]
	name := nodeName(t, victim)
	load := (&harness.Load{
		Model: harness.FakeModel, Workers: 8, Streams: 0.5, Tokens: [2]int{5, 30}, Prompt: 400, Free: true,
		Targets: func() []string { return harness.URLs(others) },
	}).Run(s)

	marks, p := mark(agents), startPulse(t)
	var back time.Duration
	for range 5 {
		victim.Signal(syscall.SIGSTOP)
		time.Sleep(2 * time.Second)
		victim.Signal(syscall.SIGCONT)
		began := time.Now()
		harness.Eventually(t, 3*time.Second, "its records again", func() bool {
			old, _ := age(others[0], name)
			return old > 0 && old < time.Second
		})
		back = max(back, time.Since(began))
		time.Sleep(2 * time.Second)
	}
	n := failures(agents, marks)
	gossiptest.Figure(t, 10, "10 real agents, one stopped for 2 s five times: %d failed events, its record fresh ≤ %v after SIGCONT", n, back.Round(time.Millisecond))
	nobodyFailed(t, p, agents, marks)
	judge(t, p, back <= 400*time.Millisecond, "its record was fresh %v after SIGCONT", back)

	for _, stop := range []time.Duration{5 * time.Second, 30 * time.Second} {
		victim.Signal(syscall.SIGSTOP)
		time.Sleep(stop)
		victim.Signal(syscall.SIGCONT)
		began := time.Now()
		harness.Eventually(t, 15*time.Second, "all fresh again", func() bool { return fresh(agents) })
		t.Logf("stopped for %v: all fresh %v after SIGCONT", stop, time.Since(began).Round(10*time.Millisecond))
		for _, a := range others { // the healthy ones are not doubted
			for _, line := range failed.FindAllString(a.Log()[marks[a]:], -1) {
				judge(t, p, strings.Contains(line, name), "%s: %s", a.Name, line)
			}
		}
	}
	answers := load.Stop()
	bad := harness.Lost(answers)
	t.Logf("%d requests while one was stopped now and then, %d lost, %d cut", len(answers), len(bad), len(harness.Failures(answers))-len(bad))
	assert.Empty(t, bad, "%s", harness.Describe(bad))

	// SIGTERM under load at all: nobody notices.
	load = (&harness.Load{
		Name: "term", Model: harness.FakeModel, Workers: 8, Streams: 0.5, Tokens: [2]int{5, 30}, Prompt: 400, Free: true,
		Targets: s.Ready(agents, 50*time.Millisecond),
	}).Run(s)
	load.WaitMore(30, time.Minute)
	marks = mark(agents)
	began := time.Now()
	victim.Signal(syscall.SIGTERM)
	leaves := make([]time.Duration, len(others))
	for i, a := range others {
		harness.Eventually(t, 45*time.Second, a.Name+" to know of the leave", func() bool {
			return said(a, marks, "left", name)
		})
		leaves[i] = time.Since(began)
	}
	state := victim.Wait(40 * time.Second)
	exit := time.Since(began)
	load.WaitMore(30, time.Minute)
	answers = load.Stop()
	bad = harness.Failures(answers)
	gossiptest.Figure(t, 9, "10 real agents under load: left the list of all %v and exit %v after SIGTERM, drain included; %d of %d requests failed, %d failed events",
		leaves[len(leaves)-1].Round(10*time.Millisecond), exit.Round(10*time.Millisecond), len(bad), len(answers), failures(others, marks))
	assert.Equal(t, "exit 0", state)
	assert.LessOrEqual(t, exit, 34*time.Second, "drain timeout and 4 s")
	assert.Empty(t, bad, "%s", harness.Describe(bad))
	nobodyFailed(t, p, others, marks)

	// SIGKILL.
	victim.Start()
	victim.WaitReady(20 * time.Second)
	harness.Eventually(t, 15*time.Second, "all fresh", func() bool { return fresh(agents) })
	name = nodeName(t, victim)
	load = (&harness.Load{
		Name: "kill", Model: harness.FakeModel, Workers: 8, Streams: 0.5, Tokens: [2]int{5, 30}, Prompt: 400, Free: true,
		Targets: func() []string { return harness.URLs(others) },
	}).Run(s)
	load.WaitMore(30, time.Minute)
	marks = mark(agents)
	victim.Kill()
	began = time.Now()
	var times []time.Duration
	for _, a := range others {
		harness.Eventually(t, 15*time.Second, a.Name+" to know of the kill", func() bool {
			return said(a, marks, "failed", name)
		})
		times = append(times, time.Since(began))
	}
	answers = load.Stop()
	bad = harness.Lost(answers)
	gossiptest.Figure(t, 8, "10 real agents under load: kill known to the first after %v, to all after %v; %d of %d requests lost",
		times[0].Round(10*time.Millisecond), times[len(times)-1].Round(10*time.Millisecond), len(bad), len(answers))
	assert.Empty(t, bad, "%s", harness.Describe(bad))
	judge(t, p, times[len(times)-1] <= 8*time.Second, "the kill was known after %v", times)
}

// One of ten agents gets little of the CPU: first it is held to a twentieth and to a hundredth of a core, then it has half a
// core and shares it with 20 endless loops, and with 100. With 100 it may be found dead, and comes back; nobody else is.
func TestStarved(t *testing.T) {
	longOnly(t)
	for _, way := range []struct {
		name  string
		steps []starving
	}{{"quota", []starving{{0.05, 0}, {0.01, 0}}}, {"loops", []starving{{0.5, 20}, {0.5, 100}}}} {
		t.Run(way.name, func(t *testing.T) {
			s, agents := ten(t)
			victim := agents[9]
			p := startPulse(t)
			var text []string
			for _, step := range way.steps {
				text = append(text, step.run(t, s, agents, victim, p))
			}
			gossiptest.Figure(t, 11, "10 real agents, one with %s", strings.Join(text, "; "))
		})
	}
}

// starving is a share of one core and so many loops beside the agent in it.
type starving struct {
	share float64
	loops int
}

func (x starving) run(t *testing.T, s *harness.Stage, agents []*harness.Agent, victim *harness.Agent, p *pulse) string {
	t.Helper()
	name := nodeName(t, victim)
	if reason := harness.Quota(victim.Process, x.share); reason != "" {
		t.Skip(reason)
	}
	marks := mark(agents)
	end := s.Spin(victim.Process, x.loops)
	time.Sleep(25 * time.Second)
	end()
	own, foreign := 0, 0
	for _, a := range agents {
		for _, line := range failed.FindAllString(a.Log()[marks[a]:], -1) {
			if strings.HasSuffix(line, name) {
				own++
			} else if a != victim { // a starved one may take others for dead
				foreign++
			}
		}
	}
	judge(t, p, foreign == 0, "%d healthy agents found dead", foreign)
	judge(t, p, x.loops > 20 || own == 0, "found dead %d times with %.0f %% of a core beside %d loops", own, 100*x.share, x.loops)
	began := time.Now()
	harness.Eventually(t, 20*time.Second, "all fresh again", func() bool { return fresh(agents) })
	return fmt.Sprintf("%.0f %% of a core for 25 s beside %d loops: %d failed events about it, %d about others, all fresh %v later",
		100*x.share, x.loops, own, foreign, time.Since(began).Round(10*time.Millisecond))
}
