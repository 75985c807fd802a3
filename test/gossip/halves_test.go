//go:build linux

package gossip

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// silence is the limit that the agents of TestHalves have: a stream that is cut ends by it at the latest. A request that
// was sent over the cut and had no answer is found lost by the connection, after 20 s, and goes elsewhere.
const (
	silence = 5 * time.Second
	lost    = 20 * time.Second
)

// Ten agents are cut in halves for 40 s under load. Clients stay on their side. What runs inside one half notices nothing;
// what runs across goes on, or ends with an error within the silence limit; after healing all is fresh within 10 s.
func TestHalves(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	s := harness.New(t)
	l := s.NewLab(10)
	// In turn, so that much runs across when the cut comes; the default would keep it at the entry while that is idle.
	agents := l.StartAll([]string{"-decode-step", "30ms", "-slots", "16", "-prefill-rate", "20000"},
		harness.Env{"GRAPEVINE_IDLE_TIMEOUT": silence.String(), "GRAPEVINE_POLICY": "round_robin"})
	harness.Eventually(t, 15*time.Second, "fresh records", func() bool { return fresh(agents) })
	left, right := l.Hosts(1, 2, 3, 4, 5), l.Hosts(6, 7, 8, 9, 10)
	var loads []*harness.Load
	for i, free := range []bool{true, false} {
		urls := harness.URLs(agents)
		loads = append(loads, (&harness.Load{
			Name: fmt.Sprintf("%d", i), Model: harness.FakeModel, Workers: 10, Streams: 0.7, Tokens: [2]int{10, 80}, Prompt: 600, Free: free,
			Targets: func() []string { return urls },
		}).Run(s))
	}
	loads[0].WaitMore(50, time.Minute)

	l.Cut(left, right)
	cut := time.Now()
	known := func(n int) bool {
		for _, a := range agents {
			if r, err := a.Report(); err != nil || r.Gossip.Members != n {
				return false
			}
		}
		return true
	}
	harness.Eventually(t, 20*time.Second, "both halves to know", func() bool { return known(5) })
	split := time.Since(cut)
	time.Sleep(40*time.Second - split)
	l.Heal()
	healed := time.Now()
	harness.Eventually(t, 30*time.Second, "all fresh again", func() bool { return fresh(agents) })
	whole := time.Since(healed)
	loads[0].WaitMore(30, time.Minute)
	var answers []harness.Answer
	for _, load := range loads {
		answers = append(answers, load.Stop()...)
	}

	// Where each request ran, by the engines' journals.
	half := func(n int) int { return (n - 1) / 5 }
	ran := map[string]map[int]bool{}
	for _, r := range s.Runs() {
		var n int
		if _, err := fmt.Sscanf(r.Engine, "engine%d.journal", &n); err == nil && r.RequestID != "" {
			if ran[r.RequestID] == nil {
				ran[r.RequestID] = map[int]bool{}
			}
			ran[r.RequestID][half(n)] = true
		}
	}
	inside, across, during, broken := 0, 0, 0, 0
	var longest, slowest time.Duration // of those that ended with an error; of those inside
	for _, a := range answers {
		entry := half(entryOf(agents, a))
		over := ran[a.ID][1-entry]
		hit := a.Start.Before(cut) && a.Start.Add(a.Total).After(cut)
		switch {
		case !over:
			inside++
			slowest = max(slowest, a.Total)
			assert.NoError(t, a.Err, "inside a half: %v", a)
		case hit || a.Start.After(cut) && a.Start.Before(healed):
			across++
			if a.Err != nil {
				broken++
				end := a.Start.Add(a.Total).Sub(cut)
				if a.Start.After(cut) {
					end = a.Total
				}
				longest = max(longest, end)
				t.Logf("across: free %v, %v", a.Free, a)
				if a.Stream && a.Content != "" {
					assert.Contains(t, string(a.Body), `"error"`, "a cut stream ends with an error event: %v", a)
				}
			}
		default:
			assert.NoError(t, a.Err, "before the cut or after healing: %v", a)
		}
		if a.Start.After(cut) && a.Start.Before(healed) {
			during++
		}
	}
	t.Logf("%d requests, %d of them started during the cut; %d inside a half", len(answers), during, inside)
	gossiptest.Figure(t, 12, "10 real agents cut for 40 s under load: known after %v, all fresh %v after healing; 0 errors in %d requests that ran inside a half, the slowest %v; %d ran across, %d of them ended with an error, the last %v after the cut",
		split.Round(10*time.Millisecond), whole.Round(10*time.Millisecond), inside, slowest.Round(10*time.Millisecond), across, broken, longest.Round(10*time.Millisecond))
	assert.Positive(t, across, "nothing ran across")
	assert.Greater(t, during, 100)
	assert.LessOrEqual(t, split, 12*time.Second)
	assert.LessOrEqual(t, whole, 10*time.Second)
	assert.LessOrEqual(t, longest, silence+2*time.Second)
	assert.LessOrEqual(t, slowest, lost+10*time.Second)
	assert.Empty(t, harness.Twice(s.Runs(), lost))
}

// entryOf is the number of the agent that an answer's request went to.
func entryOf(agents []*harness.Agent, a harness.Answer) int {
	for _, x := range agents {
		if strings.HasPrefix(a.Target, x.URL) {
			return x.N
		}
	}
	return 0
}
