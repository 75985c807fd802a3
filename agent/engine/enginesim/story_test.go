package enginesim

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ask makes the body of a chat request with one user message.
func ask(content string, max int, stream bool) string {
	c, _ := json.Marshal(content)
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%s}],"max_tokens":%d,"stream":%t}`, c, max, stream)
}

const chatPath = "/v1/chat/completions"

// together sends all bodies at once and returns the replies in their order.
func (h *harness) together(bodies ...string) []reply {
	out := make([]reply, len(bodies))
	var wg sync.WaitGroup
	for i, b := range bodies {
		wg.Go(func() { out[i] = h.post(chatPath, b) })
	}
	wg.Wait()
	return out
}

func TestFourTogetherAreAsFastAsOneAndTheFifthWaits(t *testing.T) {
	bubble(t, ServerConfig{Params: Rates(10_000, 20*time.Millisecond, 4)}, func(h *harness) {
		one := h.post(chatPath, ask("hello", 50, true))
		assert.Equal(t, 20*time.Millisecond, one.first.Round(time.Millisecond), "first token")
		assert.Equal(t, time.Second, one.took.Round(time.Millisecond))
		var bodies []string
		for i := range 5 {
			bodies = append(bodies, ask(fmt.Sprint("hello ", i), 50, true))
		}
		var slow int
		for _, r := range h.together(bodies...) {
			if r.took > 1500*time.Millisecond {
				slow++
				assert.Equal(t, 2*time.Second, r.took.Round(20*time.Millisecond))
			} else {
				assert.Equal(t, time.Second, r.took.Round(40*time.Millisecond))
			}
		}
		assert.Equal(t, 1, slow, "one of five found no slot")
	})
}

func TestAPromptTakesItsTimeOnceAndThenComesFromTheCache(t *testing.T) {
	bubble(t, ServerConfig{Params: Rates(10_000, 20*time.Millisecond, 4)}, func(h *harness) {
		prompt := strings.Repeat("word", 5000)
		cold := h.post(chatPath, ask(prompt, 2, false))
		warm := h.post(chatPath, ask(prompt, 2, false))
		other := h.post(chatPath, ask("x"+prompt, 2, false))
		assert.Equal(t, 520*time.Millisecond, cold.took.Round(20*time.Millisecond), "5,000 tokens at 10,000/s and a step")
		assert.Less(t, warm.took, 80*time.Millisecond)
		assert.Equal(t, cold.took.Round(20*time.Millisecond), other.took.Round(20*time.Millisecond), "a prefix that differs in its first byte is another")
		assert.Contains(t, warm.body, `"cached_tokens":4608`)
		assert.Contains(t, h.get("/metrics").body, "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"sim\"} 4608.0")
	})
}

func TestAnAnswerIsPartOfTheNextTurnsPrefix(t *testing.T) {
	p := DefaultParams()
	p.BlockTokens = 16
	bubble(t, ServerConfig{Params: p}, func(h *harness) {
		first := strings.Repeat("question ", 20)
		var r struct {
			Choices []struct{ Message struct{ Content string } }
		}
		require.NoError(t, json.Unmarshal([]byte(h.post(chatPath, ask(first, 100, false)).body), &r))
		q, _ := json.Marshal(first)
		a, _ := json.Marshal(r.Choices[0].Message.Content)
		var u struct {
			Usage struct {
				PromptTokensDetails struct {
					CachedTokens int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		second := fmt.Sprintf(`{"messages":[{"role":"user","content":%s},{"role":"assistant","content":%s},{"role":"user","content":"and?"}],"max_tokens":2}`, q, a)
		require.NoError(t, json.Unmarshal([]byte(h.post(chatPath, second).body), &u))
		assert.GreaterOrEqual(t, u.Usage.PromptTokensDetails.CachedTokens, 144, "45 tokens asked, 100 answered, whole blocks of 16")
	})
}

// The heart of testing continuation: broken off anywhere and continued elsewhere, the text is the uninterrupted one.
func TestContinuationIsExact(t *testing.T) {
	for _, dialect := range []string{"vllm", "sglang", "llamacpp"} {
		t.Run(dialect, func(t *testing.T) {
			bubble(t, ServerConfig{Dialect: dialect, Seed: 7, StopEarly: true, MeanOutput: 60}, func(h *harness) {
				for _, question := range []string{"Say hello", "Wie geht's? 你好", "3"} {
					q, _ := json.Marshal(question)
					whole := parse(t, h.post(chatPath, ask(question, 40, true)).body)
					require.True(t, whole.done)
					n := len(whole.text) / bytesPerToken
					for k := range n {
						a, _ := json.Marshal(whole.text[:k*bytesPerToken])
						rest := parse(t, h.post(chatPath, fmt.Sprintf(
							`{"messages":[{"role":"user","content":%s},{"role":"assistant","content":%s}],"continue_final_message":true,"add_generation_prompt":false,"max_tokens":%d,"stream":true}`, q, a, 40-k)).body)
						assert.Equal(t, whole.text[k*bytesPerToken:], rest.text, "cut after %d tokens", k)
						assert.Equal(t, whole.finish, rest.finish)
					}
					if t.Failed() {
						return
					}
				}
				prompt := "def main():"
				whole := parse(t, h.post("/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":30,"stream":true}`, prompt)).body)
				for k := range len(whole.text) / bytesPerToken {
					p, _ := json.Marshal(prompt + whole.text[:k*bytesPerToken])
					rest := parse(t, h.post("/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"stream":true}`, p, 30-k)).body)
					assert.Equal(t, whole.text[k*bytesPerToken:], rest.text, "completion cut after %d tokens", k)
				}
			})
		})
	}
}

func TestWithoutContinueFinalMessageAnAnswerStartsAnew(t *testing.T) {
	trailing := `{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":" the and"}],"max_tokens":5%s}`
	bubble(t, ServerConfig{}, func(h *harness) {
		closed := h.post(chatPath, fmt.Sprintf(trailing, ""))
		open := h.post(chatPath, fmt.Sprintf(trailing, `,"continue_final_message":true,"add_generation_prompt":false`))
		assert.NotEqual(t, content(t, closed), content(t, open), "vLLM closes the turn")
		both := h.post(chatPath, fmt.Sprintf(trailing, `,"continue_final_message":true,"add_generation_prompt":true`))
		assert.Equal(t, 400, both.status)
	})
	bubble(t, ServerConfig{Dialect: "llamacpp"}, func(h *harness) {
		whole := h.post(chatPath, fmt.Sprintf(trailing, ""))
		assert.True(t, strings.HasPrefix(content(t, whole), " the and"), "llama.cpp continues by itself, and repeats the prefix without stream")
		assert.Len(t, content(t, whole), len(" the and")+20)
		s := parse(t, h.post(chatPath, fmt.Sprintf(trailing, `,"stream":true`)).body)
		assert.Equal(t, content(t, whole)[len(" the and"):], s.text, "but not in streams")
	})
}

// content is the text of a whole chat reply.
func content(t *testing.T, r reply) string {
	t.Helper()
	var v struct {
		Choices []struct{ Message struct{ Content string } }
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &v), r.body)
	require.NotEmpty(t, v.Choices, r.body)
	return v.Choices[0].Message.Content
}

func TestStreamAndWholeSayTheSame(t *testing.T) {
	for _, dialect := range []string{"vllm", "sglang", "llamacpp"} {
		bubble(t, ServerConfig{Dialect: dialect}, func(h *harness) {
			for i := range 10 {
				q := fmt.Sprint("question ", i)
				assert.Equal(t, content(t, h.post(chatPath, ask(q, 33, false))), parse(t, h.post(chatPath, ask(q, 33, true)).body).text)
			}
		})
	}
}

func TestServersOfOneModelAgreeAndOthersDiffer(t *testing.T) {
	say := func(seed uint64) (s string) {
		bubble(t, ServerConfig{Seed: seed}, func(h *harness) { s = content(t, h.post(chatPath, ask("hi", 20, false))) })
		return s
	}
	one, same, other := say(3), say(3), say(4)
	assert.Equal(t, one, same)
	assert.NotEqual(t, one, other)
}

func TestAnAnswerWithoutLimitEndsByItself(t *testing.T) {
	bubble(t, ServerConfig{MeanOutput: 30}, func(h *harness) {
		total := 0
		for i := range 50 {
			s := parse(t, h.post(chatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":"q %d"}],"stream":true,"stream_options":{"include_usage":true}}`, i)).body)
			assert.Equal(t, "stop", s.finish)
			assert.EqualValues(t, len(s.text)/bytesPerToken+1, s.usage["completion_tokens"], "the end is a token too")
			total += len(s.text) / bytesPerToken
		}
		assert.InDelta(t, 30, total/50, 15)
	})
}

func TestStopStringsEndTheAnswerBeforeThem(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		full := content(t, h.post(chatPath, ask("hi", 60, false)))
		stop := full[101:107] // across tokens
		at := strings.Index(full, stop)
		s, _ := json.Marshal(stop)
		body := strings.TrimSuffix(ask("hi", 60, true), "}") + `,"stop":[` + string(s) + `]}`
		got := parse(t, h.post(chatPath, body).body)
		assert.Equal(t, full[:at], got.text)
		assert.Equal(t, "stop", got.finish)
	})
}

func TestChoicesAndPromptLists(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		var v struct {
			Choices []struct {
				Index int
				Text  string
			}
			Usage struct {
				PromptTokens     int `json:"prompt_tokens"`
				CompletionTokens int `json:"completion_tokens"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(h.post("/v1/completions", `{"prompt":["one two ","three four"],"n":2,"max_tokens":5}`).body), &v))
		require.Len(t, v.Choices, 4)
		assert.NotEqual(t, v.Choices[0].Text, v.Choices[1].Text)
		assert.Equal(t, 2+3, v.Usage.PromptTokens)
		assert.Equal(t, 20, v.Usage.CompletionTokens)
		r := h.post("/v1/completions", `{"prompt":["one two ","three four"],"n":2,"max_tokens":5,"stream":true}`)
		for i := range 4 {
			assert.Equal(t, 5, strings.Count(r.body, fmt.Sprintf(`"index":%d,`, i)))
		}
		echo := h.post("/v1/completions", `{"prompt":"abc","max_tokens":2,"echo":true}`)
		assert.Contains(t, echo.body, `"text":"abc`)
	})
}

func TestEmbeddings(t *testing.T) {
	bubble(t, ServerConfig{Embeddings: true}, func(h *harness) {
		var v struct {
			Data []struct{ Embedding []float32 }
		}
		require.NoError(t, json.Unmarshal([]byte(h.post("/v1/embeddings", `{"input":["a","b","a"]}`).body), &v))
		require.Len(t, v.Data, 3)
		assert.Len(t, v.Data[0].Embedding, dimensions)
		assert.Equal(t, v.Data[0], v.Data[2])
		assert.NotEqual(t, v.Data[0], v.Data[1])
		var e struct {
			Data []struct{ Embedding string }
		}
		require.NoError(t, json.Unmarshal([]byte(h.post("/v1/embeddings", `{"input":"a","encoding_format":"base64"}`).body), &e))
		raw, err := base64.StdEncoding.DecodeString(e.Data[0].Embedding)
		require.NoError(t, err)
		assert.Len(t, raw, 4*dimensions)
	})
}

func TestResponsesAreKept(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		var v struct {
			ID     string
			Status string
			Output []struct{ Content []struct{ Text string } }
		}
		r := h.post("/v1/responses", `{"input":"hello","max_output_tokens":5}`)
		require.NoError(t, json.Unmarshal([]byte(r.body), &v), r.body)
		assert.Equal(t, "completed", v.Status)
		assert.Len(t, v.Output[0].Content[0].Text, 20)
		assert.Equal(t, r.body, h.get("/v1/responses/"+v.ID).body)
		next := h.post("/v1/responses", fmt.Sprintf(`{"input":"and?","max_output_tokens":5,"previous_response_id":%q,"stream":true}`, v.ID))
		assert.Contains(t, next.body, "event: response.created\n")
		assert.Equal(t, 5, strings.Count(next.body, "event: response.output_text.delta\n"))
		assert.Contains(t, next.body, "event: response.completed\n")
		assert.Equal(t, 404, h.post("/v1/responses", `{"input":"x","previous_response_id":"resp_other"}`).status)
		assert.Equal(t, 404, h.get("/v1/responses/resp_other").status)
	})
}

func TestTokenizeCountsWhatUsageCounts(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		s := content(t, h.post(chatPath, ask("hi", 17, false)))
		p, _ := json.Marshal(s)
		assert.Contains(t, h.post("/tokenize", `{"prompt":`+string(p)+`}`).body, `"count":17,`)
	})
	bubble(t, ServerConfig{Dialect: "llamacpp"}, func(h *harness) {
		var v struct{ Tokens []int }
		require.NoError(t, json.Unmarshal([]byte(h.post("/tokenize", `{"content":"12345"}`).body), &v))
		assert.Len(t, v.Tokens, 2)
	})
}

func TestAFullQueueRefuses(t *testing.T) {
	p := Rates(10_000, 20*time.Millisecond, 2)
	p.MaxQueued = 3
	bubble(t, ServerConfig{Params: p}, func(h *harness) {
		var refused int
		for _, r := range h.together(ask("a", 20, true), ask("b", 20, true), ask("c", 20, true), ask("d", 20, true), ask("e", 20, false)) {
			if r.status == 503 {
				refused++
				assert.Contains(t, r.body, "The engine is currently busy and cannot accept new requests.")
				assert.Zero(t, r.took)
			}
		}
		assert.Equal(t, 2, refused)
		assert.Contains(t, h.get("/metrics").body, `vllm:admission_rejections_total{model_name="sim",reason="max_num_queued_reqs"} 2.0`)
	})
}

func TestWhenTheHeadComes(t *testing.T) {
	for dialect, late := range map[string]bool{"vllm": false, "llamacpp": true} {
		bubble(t, ServerConfig{Dialect: dialect, Params: Rates(10_000, 20*time.Millisecond, 1)}, func(h *harness) {
			var wg sync.WaitGroup
			wg.Go(func() { h.post(chatPath, ask("first", 50, true)) })
			synctest.Wait()
			begin := time.Now()
			req, _ := http.NewRequestWithContext(h.t.Context(), "POST", "http://engine"+chatPath, strings.NewReader(ask("second", 1, true)))
			req.Header.Set("Content-Type", "application/json")
			resp, err := h.client.Do(req)
			require.NoError(t, err)
			assert.Equal(t, late, time.Since(begin) > 900*time.Millisecond, "%s: head after %v", dialect, time.Since(begin))
			_ = readAll(t, resp)
			wg.Wait()
		})
	}
}

// hangUp starts a request, leaves after d, and returns how long its job stays at the engine from then on.
func (h *harness) hangUp(body string, d time.Duration) time.Duration {
	ctx, cancel := context.WithTimeout(h.t.Context(), d)
	defer cancel()
	h.do(ctx, "POST", chatPath, body)
	left := time.Now()
	for {
		synctest.Wait()
		if st := h.Stats(); st.Running+st.Waiting == 0 {
			return time.Since(left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestHangingUpFreesTheSlot(t *testing.T) {
	for name, c := range map[string]struct {
		cfg    ServerConfig
		stream bool
		want   time.Duration
	}{
		"vllm stream":      {ServerConfig{}, true, 0},
		"vllm whole":       {ServerConfig{}, false, 0},
		"vllm with lag":    {ServerConfig{HangUpLag: 100 * time.Millisecond}, true, 100 * time.Millisecond},
		"llama.cpp stream": {ServerConfig{Dialect: "llamacpp"}, true, 0},
		"llama.cpp whole":  {ServerConfig{Dialect: "llamacpp"}, false, 20*time.Second - 500*time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, c.cfg, func(h *harness) {
				assert.Equal(t, c.want, h.hangUp(ask("hello", 1000, c.stream), 500*time.Millisecond).Round(50*time.Millisecond))
				j := h.Journal()
				require.Len(t, j, 1)
				assert.NotZero(t, j[0].Gone)
				assert.InDelta(t, (500*time.Millisecond+c.want)/(20*time.Millisecond), j[0].Tokens, 1, "computed")
				if c.want > time.Second {
					assert.Equal(t, "unheard", j[0].Outcome)
				} else {
					assert.Equal(t, "aborted", j[0].Outcome)
				}
			})
		})
	}
}

// llama.cpp notices a reset, not a close: only real sockets know the difference.
func TestAResetStopsLlamaCpp(t *testing.T) {
	s, err := NewServer(ServerConfig{Dialect: "llamacpp"})
	require.NoError(t, err)
	address := serveTCP(t, s)
	c, err := net.Dial("tcp", address)
	require.NoError(t, err)
	body := ask("hello", 1000, false)
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return s.Stats().Running == 1 }, 5*time.Second, time.Millisecond)
	require.NoError(t, c.(*net.TCPConn).SetLinger(0))
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return s.Stats().Running == 0 }, 2*time.Second, time.Millisecond)
	assert.Equal(t, "aborted", s.Journal()[0].Outcome)
}

// serveTCP runs s on a loopback port until the test ends.
func serveTCP(t *testing.T, s *Server) string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan net.Addr, 1)
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, s.Run(ctx)) })
	wg.Go(func() {
		assert.NoError(t, s.ListenAndServe(ctx, "tcp", "127.0.0.1:0", func(a net.Addr) { ready <- a }))
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	select {
	case a := <-ready:
		return a.String()
	case <-time.After(5 * time.Second):
		t.Fatal("not ready")
		return ""
	}
}

func TestTheJournalShowsWhatRan(t *testing.T) {
	var lines strings.Builder
	bubble(t, ServerConfig{Journal: &lines}, func(h *harness) {
		req, _ := http.NewRequestWithContext(h.t.Context(), "POST", "http://engine"+chatPath, strings.NewReader(ask("hi", 7, true)))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", "abc")
		resp, err := h.client.Do(req)
		require.NoError(t, err)
		assert.Equal(t, "chatcmpl-abc", parse(t, readAll(t, resp)).id)
		h.post(chatPath, ask("hi", 7, false))
		var list []Entry
		require.NoError(t, json.Unmarshal([]byte(h.get("/journal").body), &list))
		require.Len(t, list, 2)
		assert.Equal(t, list[0].PromptHash, list[1].PromptHash)
		e := list[0]
		assert.Equal(t, "abc", e.RequestID)
		assert.Equal(t, "done", e.Outcome)
		assert.Equal(t, 7, e.Tokens)
		assert.NotZero(t, e.Conn)
		assert.InDelta(t, (20 * time.Millisecond).Nanoseconds(), e.First-e.Received, 1)
		assert.InDelta(t, (140 * time.Millisecond).Nanoseconds(), e.End-e.Received, 1)
	})
	assert.Equal(t, 4, strings.Count(lines.String(), "\n"), "a line at the start and at the end of each")
	assert.Equal(t, 2, strings.Count(lines.String(), `"outcome":"running"`))
}

func TestLlamaCppSlots(t *testing.T) {
	p := Rates(10_000, 20*time.Millisecond, 2)
	bubble(t, ServerConfig{Dialect: "llamacpp", Params: p}, func(h *harness) {
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() { h.post(chatPath, ask(fmt.Sprint(i), 20, true)) })
		}
		time.Sleep(200 * time.Millisecond)
		var slots []map[string]any
		require.NoError(t, json.Unmarshal([]byte(h.get("/slots").body), &slots))
		require.Len(t, slots, 2)
		for _, s := range slots {
			assert.Equal(t, true, s["is_processing"])
			assert.Greater(t, s["n_prompt_tokens"], 13.0, "grows with the answer")
		}
		m := h.get("/metrics").body
		assert.Contains(t, m, "llamacpp:requests_processing 2\n")
		assert.Contains(t, m, "llamacpp:requests_deferred 1\n")
		wg.Wait()
	})
}

func TestWhenRunEndsEverythingIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := NewServer(ServerConfig{})
		require.NoError(t, err)
		l := newPipes()
		ctx, cancel := context.WithCancel(t.Context())
		serving, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { assert.NoError(t, s.Run(ctx)) })
		wg.Go(func() { assert.NoError(t, s.Serve(serving, l)) })
		h := &harness{s, t, &http.Client{Transport: &http.Transport{DialContext: l.dial, DisableKeepAlives: true}}}
		time.AfterFunc(time.Second, cancel)
		r := h.post(chatPath, ask("hi", 1000, true))
		require.Error(t, r.err, "no end that looks like one")
		assert.False(t, parse(t, r.body).done)
		assert.Equal(t, time.Second, r.took)
		stop()
		wg.Wait()
	})
}
