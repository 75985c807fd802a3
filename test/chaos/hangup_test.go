package chaos

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// Clients that hang up free a real llama.cpp server: while it streams, while it makes an answer that is not streamed, while it
// reads the prompt, and while the request waits at the agent; at the entry's own engine and through a hop.
func TestHangUp(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(2)
	llama := s.LlamaCpp(1, "--parallel", "1", "-c", "4096", "--no-cache-prompt", "-b", "32", "-ub", "32")
	agents := []*harness.Agent{s.Agent(1, llama.URL), s.Agent(2, s.FakeEngine(2).URL)}
	for _, a := range agents {
		a.WaitReady(60 * time.Second)
		a.WaitMembers(2, 20*time.Second)
	}
	// Its log tells; its pages must be left alone, since a server that is asked all the time does not look after its clients.
	busy := func() bool {
		log := llama.Log()
		return strings.Count(log, "launch_slot_:") > strings.Count(log, "stop processing")
	}
	held := func() float64 { return agents[0].Metric("grapevine_held_requests") }
	body := func(prompt string, stream bool) []byte {
		b, err := json.Marshal(map[string]any{"model": harness.LlamaModel, "max_tokens": 1000, "stream": stream, "ignore_eos": true,
			"messages": []any{map[string]any{"role": "user", "content": prompt}}})
		require.NoError(t, err)
		return b
	}
	send := func(base string, b []byte) (hangUp func()) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { // ends with the context
			defer close(done)
			_, _, _ = streamRequest(newRequest(ctx, base, b, "", ask{}), nothing, func(*http.Response) {})
		}()
		return func() { cancel(); <-done }
	}
	harness.Eventually(t, 20*time.Second, "the hop to know the model", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, _, err := stream(ctx, agents[1].URL, greedy("hello", "", 2), nothing)
		return err == nil
	})
	long := strings.Repeat("the quick brown fox jumps over the lazy dog ", 250)
	for i, path := range []string{"own engine", "hop"} {
		for name, c := range map[string]struct {
			prompt string
			stream bool
			wait   time.Duration // behind the start
			limit  time.Duration
		}{
			"stream":                {"Count to a thousand.", true, 500 * time.Millisecond, writes},
			"not streamed":          {"Count to a thousand.", false, 500 * time.Millisecond, looks},
			"stream, prefill":       {long, true, 200 * time.Millisecond, looks},
			"not streamed, prefill": {long, false, 200 * time.Millisecond, looks},
		} {
			hangUp := send(agents[i].URL, body(c.prompt, c.stream))
			harness.Eventually(t, 20*time.Second, "the engine to work", busy)
			time.Sleep(c.wait)
			require.True(t, busy(), "%s, %s: it ended by itself", path, name)
			hangUp()
			at := time.Now()
			harness.Eventually(t, 30*time.Second, path+", "+name+": the engine to be free", func() bool { return !busy() })
			took := time.Since(at)
			t.Logf("%s, %s: free after %v", path, name, took.Round(time.Millisecond))
			assert.Less(t, took, c.limit, "%s, %s", path, name)
		}
		// The slot is taken; the second request waits at the agent and never starts.
		first := send(agents[0].URL, body("Count to a thousand.", true))
		harness.Eventually(t, 20*time.Second, "the engine to work", busy)
		harness.Eventually(t, 20*time.Second, "the agent to see it", func() bool { return agents[0].Metric("grapevine_engine_running_requests") > 0 })
		second := send(agents[i].URL, body("Count to ten thousand.", true))
		waited := false
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end) && !waited; time.Sleep(10 * time.Millisecond) {
			waited = held() > 0
		}
		second()
		at := time.Now()
		harness.Eventually(t, 5*time.Second, "an empty queue", func() bool { return held() == 0 })
		t.Logf("%s, queued (%v): gone after %v", path, waited, time.Since(at).Round(time.Millisecond))
		assert.True(t, waited, "%s: it did not wait at the agent", path)
		first()
		harness.Eventually(t, 5*time.Second, "the engine to be free", func() bool { return !busy() })
		time.Sleep(200 * time.Millisecond)
		assert.False(t, busy(), "%s: the one that hung up in the queue was started", path)
	}
}

// llama.cpp b11434 notices a client that is gone when it writes to it, thus within a token. While it has nothing to write, in a
// prefill or for an answer that is not streamed, it looks once a second, and the second begins anew with each other answer that
// it gives, such as to the reading of its metrics each 1.5 s. Nothing that a client of it can do makes that shorter.
const (
	writes = 200*time.Millisecond + 150*time.Millisecond // and what a busy machine adds
	looks  = 2 * time.Second
)
