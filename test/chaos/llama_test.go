package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// greedyPrompts are fixed, so that every run kills the same answers, at events that differ.
var greedyPrompts = []string{
	"Write a short story about a lighthouse.", "Explain how rain forms.", "List five European capitals with a fact each.",
	"Describe a walk through a forest in autumn.", "What is a prime number? Give examples.", "Write a letter to a friend about moving house.",
	"Summarise the plot of Romeo and Juliet.", "Give a recipe for pancakes.", "Explain the rules of chess.", "Describe the planets of the solar system.",
	"Write a poem about the sea.", "How does a bicycle stay upright?", "Write a dialogue between a cat and a dog.", "Explain what a database index is.",
	"Tell the history of the printing press.", "Describe how bread is baked.", "Why is the sky blue?", "Write a speech for a birthday.",
	"Explain photosynthesis to a child.", "Compare trains and planes.",
}

const greedyTokens = 48

// greedy is the body of a greedy chat. said, if not empty, is the beginning of the answer.
func greedy(prompt, said string, tokens int) []byte {
	messages := []any{map[string]any{"role": "user", "content": prompt}}
	m := map[string]any{"model": harness.LlamaModel, "temperature": 0, "max_tokens": tokens, "stream": true}
	if said != "" {
		messages = append(messages, map[string]any{"role": "assistant", "content": said})
		m["continue_final_message"], m["add_generation_prompt"] = true, false
	}
	m["messages"] = messages
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return b
}

// stream posts a body and reads the stream; each is called with the text so far after each event with content.
func stream(ctx context.Context, base string, body []byte, each func(events int, text string)) (text, finish string, err error) {
	return streamRequest(newRequest(ctx, base, body, "", ask{}), each, func(*http.Response) {})
}

func streamRequest(req *http.Request, each func(events int, text string), head func(*http.Response)) (text, finish string, err error) {
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	head(resp)
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		return "", "", fmt.Errorf("status %d: %s", resp.StatusCode, b)
	}
	done, events := false, 0
	for lines := bufio.NewReader(resp.Body); ; {
		line, err := lines.ReadString('\n')
		if doc, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok {
			if doc == "[DONE]" {
				done = true
				continue
			}
			var m struct {
				Error   json.RawMessage
				Choices []struct {
					Delta  struct{ Content string }
					Finish *string `json:"finish_reason"`
				}
			}
			if err := json.Unmarshal([]byte(doc), &m); err != nil {
				return text, finish, err
			}
			if m.Error != nil {
				return text, finish, fmt.Errorf("error event: %s", m.Error)
			}
			for _, c := range m.Choices {
				if c.Delta.Content != "" {
					text += c.Delta.Content
					events++
					each(events, text)
				}
				if c.Finish != nil {
					finish = *c.Finish
				}
			}
		}
		switch {
		case errors.Is(err, io.EOF) && !done:
			return text, finish, errors.New("ended without [DONE]")
		case errors.Is(err, io.EOF):
			return text, finish, nil
		case err != nil:
			return text, finish, err
		}
	}
}

func nothing(int, string) {}

// Real llama.cpp servers are killed with -9 at random events of greedy answers. Each answer goes on at the other server; what
// the client gets is, to the character, what that server says behind the text so far, and mostly the uninterrupted answer.
func TestContinueLlamaCpp(t *testing.T) {
	prompts := greedyPrompts
	if !*long {
		prompts = prompts[:3]
	}
	s := harness.New(t).Size(3)
	start := func(n int) *harness.Engine {
		return s.LlamaCpp(n, "--parallel", "1", "-c", "2048", "--no-cache-prompt")
	}
	engines := []*harness.Engine{start(1), start(2), start(3)}
	var agents []*harness.Agent
	for i, e := range engines {
		agents = append(agents, s.Agent(i+1, e.URL))
	}
	for _, a := range agents {
		a.WaitReady(60 * time.Second)
		a.WaitMembers(3, 20*time.Second)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	same, seams := 0, 0
	for i, prompt := range prompts {
		harness.Eventually(t, 60*time.Second, "two replicas to be ready", func() bool {
			ready := 0
			for _, a := range agents {
				if code, _ := a.Readyz(); code == http.StatusOK {
					ready++
				}
			}
			return ready >= 2
		})
		ref := engines[i%3]
		total := 0
		want, _, err := stream(ctx, ref.URL, greedy(prompt, "", greedyTokens), func(n int, _ string) { total = n })
		require.NoError(t, err)
		require.Greater(t, total, 2, "%q is answered too shortly", prompt)
		at := 1 + rnd.IntN(total-2)
		victim, seam := -1, ""
		got, finish, err := stream(ctx, agents[rnd.IntN(3)].URL, greedy(prompt, "", greedyTokens), func(n int, text string) {
			if n == at && victim < 0 {
				for j, e := range engines {
					if _, slots := harness.Get(e.URL + "/slots"); strings.Contains(slots, `"is_processing":true`) {
						victim = j
					}
				}
				if victim >= 0 {
					engines[victim].Kill()
				}
			}
		})
		require.NoError(t, err, "prompt %d, killed after event %d", i, at)
		if victim < 0 {
			t.Fatalf("prompt %d: no engine was seen at work at event %d of %d", i, at, total)
		}
		assert.NotEmpty(t, finish)
		other := engines[(victim+1)%3]
		// Between the look at the slots and the kill some more events may have come: the seam is where the texts agree with
		// what the other server says behind it.
		_, ok := seamOf(ctx, t, other.URL, prompt, got, want, at, &seam)
		if ok {
			seams++
		} else {
			t.Errorf("prompt %d: no place at which the other server would have gone on as it did:\n got %q\nwant %q", i, got, want)
		}
		if got == want {
			same++
		} else {
			t.Logf("prompt %2d differs behind %q:\n  uninterrupted %q\n  continued     %q", i, tailOf(seam), want, got)
		}
		engines[victim] = start(victim + 1)
	}
	sum := 0.0
	for _, a := range agents {
		sum += a.Metric("grapevine_continues_total")
	}
	t.Logf("%d answers killed at random events, %.0f legs continued elsewhere, %d without a flaw at the seam, %d equal the uninterrupted text", len(prompts), sum, seams, same)
	assert.Equal(t, len(prompts), seams)
	assert.GreaterOrEqual(t, same, len(prompts)*16/20)
	assert.GreaterOrEqual(t, sum, float64(len(prompts)), "an answer was not broken: nothing was shown")
}

// seamOf looks for the event at which got went over to the other server: the text before it is the uninterrupted one's, and what
// comes behind is what the other server says there. It is a few events behind the one at which the kill was decided.
func seamOf(ctx context.Context, t *testing.T, base, prompt, got, want string, at int, seam *string) (int, bool) {
	t.Helper()
	if got == want {
		return at, true
	}
	common := 0
	for common < min(len(got), len(want)) && got[common] == want[common] {
		common++
	}
	// The texts part at or behind the seam.
	for end := common; end > 0; end-- {
		prefix := got[:end]
		rest, _, err := stream(ctx, base, greedy(prompt, prefix, greedyTokens), nothing)
		if err == nil && (strings.HasPrefix(rest, got[end:]) || strings.HasPrefix(got[end:], rest)) {
			*seam = prefix
			return end, true
		}
	}
	return 0, false
}

func tailOf(s string) string { return s[max(0, len(s)-30):] }
