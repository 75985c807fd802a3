package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Three agents are restarted one after the other under load, as an upgrade does it: SIGTERM, exit, start, ready, next. Nobody
// notices: neither a client without retries that sends where readiness says, nor official clients that know a name with all
// addresses behind it.
func TestRollingRestart(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	_, urls := fakes(s, 3)
	agents := s.Mesh(urls)

	load := (&harness.Load{
		Model: harness.FakeModel, Workers: 12, Streams: 0.7, Tokens: [2]int{10, 120}, Prompt: 2000,
		Targets: s.Ready(agents, 100*time.Millisecond),
	}).Run(s)
	var official []*harness.Official
	for _, language := range harness.Languages {
		official = append(official, s.Official(language, named(agents, 3)))
	}
	load.WaitMore(50, 30*time.Second)
	for _, a := range agents {
		began := time.Now()
		require.Equal(t, "exit 0", a.Term(40*time.Second), "%s", a.Name)
		exited := time.Now()
		a.Start()
		a.WaitReady(20 * time.Second)
		t.Logf("%s: %v to exit, %v to ready", a.Name, exited.Sub(began).Round(time.Millisecond), time.Since(exited).Round(time.Millisecond))
		load.WaitMore(50, 30*time.Second)
	}
	answers := load.Stop()
	t.Logf("%d chats through three restarts", len(answers))
	failures := harness.Failures(answers)
	assert.Empty(t, failures, "%s", harness.Describe(failures))
	for _, o := range official {
		results := o.Stop(time.Minute)
		t.Logf("%d chats of the %s package", len(results), o.Language)
		assert.Greater(t, len(results), 20)
		for _, r := range results {
			assert.Empty(t, r.Error, "%s, request %d, stream %v, %d bytes of content", o.Language, r.N, r.Stream, len(r.Content))
			assert.NotEmpty(t, r.Finish)
		}
	}
	for _, a := range agents {
		a.WaitMembers(3, 10*time.Second)
		assert.NotContains(t, a.Log(), "DATA RACE")
	}
	once(t, s)
}

// named is a job of an official client with default retries whose host name resolves to all agents; it runs until Stop.
func named(agents []*harness.Agent, concurrency int) harness.Job {
	const name = "agents.test"
	return harness.Job{
		Bases:   []string{fmt.Sprintf("http://%s:%d", name, harness.ClientPort)},
		Resolve: map[string][]string{name: harness.IPs(agents)},
		Model:   harness.FakeModel, Streams: []bool{true, false}, MaxTokens: [2]int{10, 120},
		Concurrency: concurrency, MaxRetries: 2,
	}
}

// broken is what must hold for official clients' results where something was killed: whoever had no answer yet got one,
// and no cut stream looks whole.
func broken(t *testing.T, o *harness.Official, results []harness.Result) (raised int) {
	t.Helper()
	assert.Greater(t, len(results), 20)
	for _, r := range results {
		what := fmt.Sprintf("%s, request %d, stream %v, %d bytes of content, %.0f ms: %s", o.Language, r.N, r.Stream, len(r.Content), r.TotalMS, r.Error)
		if r.Error != "" {
			raised++
			// Between the head, which goes on as soon as the engine sends it (C02), and the first content lies the one
			// window in which neither we (the agent is dead) nor the package (it has a head) can repeat.
			assert.True(t, r.Opened || r.Content != "", "a request without an answer failed: %s", what)
			if r.Content == "" {
				t.Logf("head without content: %s", what)
			}
		} else {
			assert.NotEmpty(t, r.Finish, "a cut answer looks whole: %s", what)
		}
		assert.Less(t, r.TotalMS, 30_000.0, what)
	}
	return raised
}

// whole is what must hold for answers of the strict client where something was killed: failures had content, and said so.
func whole(t *testing.T, answers []harness.Answer) {
	t.Helper()
	lost, cut := harness.Lost(answers), harness.Failures(answers)
	t.Logf("%d chats, %d cut after content, %d lost", len(answers), len(cut)-len(lost), len(lost))
	assert.Empty(t, lost, "%s", harness.Describe(lost))
	for _, a := range cut {
		assert.True(t, a.Stream, "%v", a)
		assert.False(t, strings.Contains(string(a.Body), "[DONE]") && a.Finish != "", "a cut answer looks whole: %v", a)
	}
}

// once is the guarantee that no request runs at two engines at the same time.
func once(t *testing.T, s *harness.Stage) {
	t.Helper()
	runs := s.Runs()
	assert.NotEmpty(t, runs)
	assert.Empty(t, harness.Twice(runs, time.Second))
}
