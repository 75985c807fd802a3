package e2e

import (
	"net/http"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// victims is a load of long prompts, so that at any time many requests have no content yet, and of long answers.
func victims(targets []string) *harness.Load {
	return &harness.Load{
		Model: harness.FakeModel, Workers: 24, Streams: 0.7, Tokens: [2]int{20, 150}, Prompt: 12_000,
		Targets: func() []string { return targets },
	}
}

// kill -9 of an engine: its agent lives, so no request without content fails, wherever it entered.
func TestKillEngine(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	engines, urls := fakes(s, 3)
	agents := s.Mesh(urls)
	load := victims(harness.URLs(agents)).Run(s)
	load.WaitMore(60, time.Minute)
	engines[1].Kill()
	killed := time.Now()
	harness.Eventually(t, 10*time.Second, "the agent without engine to say so", func() bool {
		code, _ := agents[1].Readyz()
		return code == http.StatusServiceUnavailable
	})
	t.Logf("/readyz says so %v after the kill", time.Since(killed).Round(time.Millisecond))
	load.WaitMore(60, time.Minute)
	engines[1] = s.FakeEngine(2)
	agents[1].WaitReady(20 * time.Second)
	load.WaitMore(60, time.Minute)
	whole(t, load.Stop())
	once(t, s)
}

// kill -9 of an agent by which no request entered: none without content fails.
func TestKillAgent(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	_, urls := fakes(s, 3)
	agents := s.Mesh(urls)
	load := victims([]string{agents[0].URL, agents[2].URL}).Run(s)
	load.WaitMore(60, time.Minute)
	r, err := agents[0].Report()
	require.NoError(t, err)
	require.Len(t, r.Peers, 3)
	agents[1].Kill()
	load.WaitMore(100, time.Minute)
	agents[1].Start()
	agents[1].WaitReady(20 * time.Second)
	load.WaitMore(60, time.Minute)
	whole(t, load.Stop())
	once(t, s)
}

// kill -9 of the agent that clients are connected to: official clients with default retries, whose host name resolves to all
// agents, get an answer to each request that had no head of one; streams that had raise.
func TestKillEntryAgent(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	_, urls := fakes(s, 3)
	agents := s.Mesh(urls)
	var official []*harness.Official
	for _, language := range harness.Languages {
		official = append(official, s.Official(language, named(agents, 6)))
	}
	for _, o := range official {
		o.WaitMore(20, time.Minute)
	}
	raised := 0
	for round := range 2 {
		agents[round].Kill()
		for _, o := range official {
			o.WaitMore(20, time.Minute)
		}
		agents[round].Start()
		agents[round].WaitReady(20 * time.Second)
		for _, o := range official {
			o.WaitMore(10, time.Minute)
		}
	}
	for _, o := range official {
		results := o.Stop(time.Minute)
		n := broken(t, o, results)
		t.Logf("%s: %d chats, %d raised after content", o.Language, len(results), n)
		raised += n
	}
	once(t, s)
	assert.Positive(t, raised, "no stream was cut: the kill hit nobody, so nothing was shown")
}
