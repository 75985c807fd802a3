package e2e

import (
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The control of the other tests: clients and taps on a real engine without agents. What fails here is not grapevine's.
func TestEngineAlone(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	llama := s.LlamaCpp(1)
	tap := s.Tap(1, llama.Addr)
	var client harness.Client
	defer client.Close()
	ans := client.Do(t.Context(), tap.URL, harness.Chat{Model: harness.LlamaModel, Prompt: "Count: one, two,", MaxTokens: 8, Stream: true})
	require.NoError(t, ans.Err)
	x := tap.Exchanges()
	require.Len(t, x, 1)
	assert.Equal(t, string(x[0].Body), string(ans.Body))
	assert.Equal(t, x[0].Answer, ans.Header)
	for _, language := range harness.Languages {
		job := harness.Job{
			// A name without and with a dead address behind it: resolving is the script's own and must work.
			Bases:   []string{tap.URL, "http://engines.test:" + tap.URL[len("http://"+s.IP(1)+":"):]},
			Resolve: map[string][]string{"engines.test": {s.IP(1), s.IP(2)}},
			Model:   harness.LlamaModel, Streams: []bool{true, false}, MaxTokens: [2]int{4, 8}, Count: 8, Concurrency: 2,
		}
		results := s.Official(language, job).Stop(time.Minute)
		assert.Len(t, results, job.Count)
		for _, r := range results {
			assert.Empty(t, r.Error, "%s, request %d to %s, stream %v", language, r.N, r.Base, r.Stream)
			assert.NotEmpty(t, r.Content, "%s, request %d", language, r.N)
			assert.NotEmpty(t, r.Finish, "%s, request %d", language, r.N)
		}
	}
}
