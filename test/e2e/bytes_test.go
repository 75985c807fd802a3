package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What agents may do to heads, and nothing else. Framing (chunks) is each connection's own.
var (
	// answerHeaders may differ between what an engine sent and what a client got.
	answerHeaders = []string{
		"Connection", "Keep-Alive", // of one connection only
		"Date",              // added where the engine has none
		"X-Request-Id",      // the client's own, or a new one
		"X-Accel-Buffering", // "no" on streams, so that no proxy in front of the agents buffers
	}
	// requestHeaders may differ between what a client sent and what an engine got.
	requestHeaders = []string{
		"Connection",                            // of one connection only
		"Host",                                  // the engine's
		"X-Request-Id",                          // created where the client sends none
		"X-Forwarded-For",                       // the client's address
		"X-Forwarded-Host", "X-Forwarded-Proto", // what the client called us by
	}
)

// 200 streamed chats through three agents over three llama.cpp servers: no error, requests spread over the replicas, and what
// each client received equals, byte for byte, what its engine sent.
func TestStreamsByteForByte(t *testing.T) {
	longOnly(t)
	const chats, clients = 200, 6
	s := harness.New(t)
	var taps []*harness.Tap
	var urls []string
	for i := range 3 {
		taps = append(taps, s.Tap(i+1, s.LlamaCpp(i+1).Addr))
		urls = append(urls, taps[i].URL)
	}
	agents := s.Mesh(urls)

	// The official packages run beside: they must raise nothing under this load.
	var official []*harness.Official
	for _, language := range harness.Languages {
		official = append(official, s.Official(language, harness.Job{
			Bases: harness.URLs(agents), Model: harness.LlamaModel, Streams: []bool{true, false},
			MaxTokens: [2]int{4, 12}, Count: 12, Concurrency: 1,
		}))
	}
	answers := make([]harness.Answer, chats)
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			var client harness.Client
			defer client.Close()
			for i := c; i < chats; i += clients {
				answers[i] = client.Do(t.Context(), agents[i%3].URL, harness.Chat{
					Model: harness.LlamaModel, Prompt: fmt.Sprintf("Chat %d: tell me of grapes, wine ☕ and 葡萄.", i),
					MaxTokens: 8 + i%17, Stream: true, ID: fmt.Sprintf("chat-%d", i),
				})
			}
		})
	}
	wg.Wait()
	for _, o := range official {
		for _, r := range o.Stop(2 * time.Minute) {
			assert.Empty(t, r.Error, "%s, request %d", o.Language, r.N)
		}
	}
	require.Empty(t, harness.Failures(answers), "%s", harness.Describe(harness.Failures(answers)))

	type seen struct {
		harness.Exchange
		engine int
	}
	at := map[string]seen{} // by body of the request, which is different in each chat
	again := 0
	for i, tap := range taps {
		n := 0
		for _, x := range tap.Exchanges() {
			if x.Method == http.MethodPost && strings.Contains(string(x.Sent), `"Chat `) {
				if x.Status == 0 { // llama.cpp closed a kept connection at that moment: not run, and sent again
					again++
					continue
				}
				first, twice := at[string(x.Sent)]
				assert.False(t, twice, "%s was answered by engine %d and engine %d", x.Sent, first.engine+1, i+1)
				at[string(x.Sent)] = seen{x, i}
				n++
			}
		}
		t.Logf("engine %d answered %d of %d chats", i+1, n, chats)
		assert.Greater(t, n, chats/10, "engine %d gets its share", i+1)
	}
	replays := 0.0
	for _, a := range agents {
		replays += a.Metric("grapevine_connection_replays_total")
	}
	// The official packages' requests may be among them, and those whose connection was dead before a byte was written.
	assert.LessOrEqual(t, float64(again), replays, "what had no answer was sent again because its connection was dead")
	t.Logf("%d were sent again, as the engine closed the connection they were sent on first", again)
	crossed := 0
	for i, ans := range answers {
		x, ok := at[string(ans.Chat.Body())]
		if !assert.True(t, ok, "no engine got the body of chat %d as it was sent", i) {
			continue
		}
		if x.engine != i%3 {
			crossed++
		}
		assert.True(t, x.Whole)
		assert.Equal(t, x.Status, ans.Status)
		assert.Equal(t, string(x.Body), string(ans.Body), "chat %d", i)
		assert.Equal(t, without(x.Answer, answerHeaders), without(ans.Header, answerHeaders), "chat %d", i)
		sent := http.Header{"Content-Type": {"application/json"}, "Content-Length": {fmt.Sprint(len(x.Sent))}, "User-Agent": {"Go-http-client/1.1"}}
		assert.Equal(t, sent, without(x.Header, requestHeaders), "chat %d", i)
		assert.Equal(t, ans.ID, x.Header.Get("X-Request-Id"))
		assert.Equal(t, "127.0.0.1", x.Header.Get("X-Forwarded-For"), "the client alone, however many agents were on the way")
		assert.Equal(t, ans.ID, ans.Header.Get("X-Request-Id"))
	}
	t.Logf("%d of %d chats were answered by another replica than the one they reached", crossed, chats)
	assert.Positive(t, crossed)
}

// without is a copy of a header without the listed fields.
func without(h http.Header, names []string) http.Header {
	h = h.Clone()
	for _, n := range names {
		h.Del(n)
	}
	return h
}
