package e2e

import (
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
)

// The official packages, streaming and not, to each of three agents: nothing is raised. One engine of the three is real and
// has a model of its own, so every request for it crosses to its agent from the two others.
func TestOfficialClients(t *testing.T) {
	longOnly(t)
	s := harness.New(t)
	llama := s.LlamaCpp(3)
	_, urls := fakes(s, 2)
	agents := s.Mesh(append(urls, llama.URL))
	for _, language := range harness.Languages {
		for _, model := range []string{harness.FakeModel, harness.LlamaModel} {
			t.Run(language+"/"+model, func(t *testing.T) {
				job := harness.Job{
					Bases: harness.URLs(agents), Model: model, Streams: []bool{true, false},
					MaxTokens: [2]int{8, 24}, Count: 18, Concurrency: 3,
				}
				results := s.Official(language, job).Stop(2 * time.Minute)
				assert.Len(t, results, job.Count)
				for _, r := range results {
					assert.Empty(t, r.Error, "request %d to %s, stream %v", r.N, r.Base, r.Stream)
					assert.NotEmpty(t, r.Content, "request %d to %s, stream %v", r.N, r.Base, r.Stream)
					assert.Contains(t, []string{"stop", "length"}, r.Finish)
				}
			})
		}
	}
}
