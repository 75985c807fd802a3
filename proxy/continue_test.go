package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	engines "github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// byTable is how the agent tells the proxy what each kind of engine can do.
func byTable(kind string) Continuation {
	ab := engines.AbilitiesOf(engines.Kind(kind))
	c := Continuation{Chat: ab.ContinueChat, Fields: ab.ContinueFields, Opens: ab.OpensLastTurn, Completions: ab.ContinueCompletions}
	if t := ab.Tokenize; t.Path != "" {
		c.TokenizePath, c.TokenizeBody, c.TokenizeCount = t.Path, t.Body, t.Tokens
	}
	return c
}

// simFleet is a fleet of simulated engines that say the same.
type simFleet struct {
	*fleet
	sims []*enginesim.Server
	end  context.CancelFunc
}

func newSimFleet(t *testing.T, dialect string, n int, order []uint64, tune func(i int, c *Config)) *simFleet {
	t.Helper()
	s := &simFleet{}
	var ctx context.Context
	ctx, s.end = context.WithCancel(t.Context())
	var handlers []http.Handler
	for range n {
		sim, err := enginesim.NewServer(enginesim.ServerConfig{Params: enginesim.Rates(10_000, 20*time.Millisecond, 8), Dialect: dialect, Model: "m", Seed: 7})
		require.NoError(t, err)
		go func() { _ = sim.Run(ctx) }() // ends with ctx
		s.sims = append(s.sims, sim)
		handlers = append(handlers, sim)
	}
	s.fleet = newFleet(t, order, func(i int, c *Config) {
		c.Continue = byTable
		c.EngineKind = func() string { return dialect }
		now := time.Now()
		for b := uint64(1); b <= uint64(n); b++ {
			c.Table.SetMember(routing.Member{Boot: b, Node: fmt.Sprintf("n%d", b), Addr: peerAddr(int(b - 1)), Engine: dialect}, now)
		}
		if tune != nil {
			tune(i, c)
		}
	}, handlers...)
	t.Cleanup(s.end)
	return s
}

// streamed is a stream as an official client reads it.
type streamed struct {
	text, finish          string
	ids                   map[string]bool
	created               map[int64]bool
	roles                 int
	prompt, output, total int
	usages                int
	done                  bool
	errored               bool
	err                   error
}

func readStream(t *testing.T, body io.Reader) streamed {
	t.Helper()
	b, err := io.ReadAll(body)
	s := streamed{ids: map[string]bool{}, created: map[int64]bool{}, err: err}
	for _, ev := range strings.Split(string(b), "\n\n") {
		ev = strings.TrimSpace(ev)
		doc, ok := strings.CutPrefix(ev, "data:")
		if !ok {
			require.True(t, ev == "" || ev[0] == ':', "%q", ev)
			continue
		}
		doc = strings.TrimSpace(doc)
		require.False(t, s.done, "nothing comes behind the end marker: %q", doc)
		if doc == "[DONE]" {
			s.done = true
			continue
		}
		var m struct {
			ID      string
			Created int64
			Error   json.RawMessage
			Choices []struct {
				Text   string
				Delta  struct{ Role, Content string }
				Finish *string `json:"finish_reason"`
			}
			Usage *struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
				Total      int `json:"total_tokens"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(doc), &m), "%q", doc)
		if m.Error != nil {
			s.errored = true
			continue
		}
		s.ids[m.ID], s.created[m.Created] = true, true
		for _, c := range m.Choices {
			s.text += c.Text + c.Delta.Content
			if c.Delta.Role != "" {
				s.roles++
			}
			if c.Finish != nil {
				require.Empty(t, s.finish, "one finish reason")
				s.finish = *c.Finish
			}
		}
		if m.Usage != nil {
			s.prompt, s.output, s.total = m.Usage.Prompt, m.Usage.Completion, m.Usage.Total
			s.usages++
		}
	}
	return s
}

func (f *fleet) ask(path, body string) streamed {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+f.clients[0]+path, strings.NewReader(body))
	require.NoError(f.t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.hc.Do(req)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	require.Equal(f.t, 200, resp.StatusCode)
	return readStream(f.t, resp.Body)
}

// whole checks that s is the answer want, as if nothing had happened.
func (s streamed) whole(t *testing.T, want streamed, what string) {
	t.Helper()
	require.NoError(t, s.err, what)
	require.Equal(t, want.text, s.text, what)
	require.Equal(t, want.finish, s.finish, what)
	require.True(t, s.done, what)
	require.False(t, s.errored, what)
	require.Len(t, s.ids, 1, what)
	require.Len(t, s.created, 1, what)
	require.Equal(t, want.roles, s.roles, what)
	require.Equal(t, [3]int{want.prompt, want.output, want.total}, [3]int{s.prompt, s.output, s.total}, "usage "+what)
}

// continued is how many streams the first agent has had continued to their end.
func (f *fleet) continued() (n uint64) {
	for label, k := range f.metrics(0).Continues {
		if strings.HasSuffix(label, " ok") {
			n += k
		}
	}
	return n
}

var continuable = map[string]string{
	chatPath:          `{"model":"m","stream":true,"max_tokens":12,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"tell me"}]}`,
	"/v1/completions": `{"prompt":"once upon <a> time","model":"m","stream":true,"max_tokens":12,"stream_options":{"include_usage":true}}`,
}

// Whatever breaks a stream, after whichever event: its client gets the uninterrupted text, one id, one role, one finish.
func TestContinueAfterEachEvent(t *testing.T) {
	for _, dialect := range []string{"vllm", "sglang", "llamacpp"} {
		for path, body := range continuable {
			for _, kind := range []string{"reset", "cut", "abort", "engine-dead"} {
				t.Run(dialect+path+" "+kind, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						for _, order := range [][]uint64{{1, 2, 3}, {2, 1, 3}, {2, 3, 1}} {
							f := newSimFleet(t, dialect, 3, order, nil)
							want := f.ask(path, body)
							require.Equal(t, "length", want.finish)
							require.NotEmpty(t, want.text)
							for after := 1; after < 12; after++ {
								require.NoError(t, f.sims[order[0]-1].Inject(enginesim.Fault{Kind: kind, After: after, Count: 1}))
								f.ask(path, body).whole(t, want, fmt.Sprintf("%s after %d in order %v", kind, after, order))
							}
							f.idle()
							require.EqualValues(t, 11, f.continued(), "each was continued: %v", f.metrics(0).Continues)
							f.end()
							f.stop()
						}
					})
				})
			}
		}
	}
}

// A second death is survived, a third is not: then the client is told.
func TestContinueAtMostTwoDeaths(t *testing.T) {
	for deaths := 1; deaths <= 4; deaths++ {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "vllm", 5, []uint64{2, 3, 4, 5, 1}, nil)
			want := f.ask(chatPath, continuable[chatPath])
			for i := range deaths {
				require.NoError(t, f.sims[i+1].Inject(enginesim.Fault{Kind: "reset", After: 2, Count: 1}))
			}
			got := f.ask(chatPath, continuable[chatPath])
			if deaths <= continueDeaths {
				got.whole(t, want, "deaths")
			} else {
				require.Error(t, got.err)
				assert.True(t, got.errored)
				assert.False(t, got.done)
				assert.Equal(t, want.text[:len(got.text)], got.text)
				assert.Equal(t, outcomeCut, f.lastPick().Outcome)
			}
			f.idle()
			f.end()
			f.stop()
		})
	}
}

// A stream that goes silent, with comment lines or without a word, is continued when the limit has passed.
func TestContinueAfterSilence(t *testing.T) {
	for _, kind := range []string{"hang", "silence"} {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "llamacpp", 2, []uint64{2, 1}, func(_ int, c *Config) { c.IdleTimeout = 3 * time.Second })
			want := f.ask(chatPath, continuable[chatPath])
			start := time.Now()
			time.AfterFunc(150*time.Millisecond, func() { _ = f.sims[1].Inject(enginesim.Fault{Kind: kind}) })
			f.ask(chatPath, continuable[chatPath]).whole(t, want, kind)
			assert.Less(t, time.Since(start), 4*time.Second)
			f.sims[1].Clear("")
			f.idle() // the answer's end reaches the client before the books
			assert.EqualValues(t, 1, f.metrics(0).Continues["hang ok"])
			f.end()
			f.stop()
		})
	}
}

// At the end of its drain timeout an agent takes everything from its engine. What entered elsewhere and what entered here
// goes on at another replica; without another one the client is told.
func TestContinueWhenEmptied(t *testing.T) {
	for _, c := range []struct {
		order []uint64
		who   int // is emptied
		whole bool
	}{{[]uint64{2, 1}, 1, true}, {[]uint64{1, 2}, 0, true}, {[]uint64{1}, 0, false}, {[]uint64{2}, 1, false}} {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "vllm", 2, c.order, nil)
			want := f.ask(chatPath, continuable[chatPath])
			time.AfterFunc(150*time.Millisecond, func() { f.agents[c.who].SetDraining(true); f.agents[c.who].Empty() })
			got := f.ask(chatPath, continuable[chatPath])
			if c.whole {
				got.whole(t, want, "emptied")
				assert.Contains(t, f.metrics(0).Continues, "drain ok")
			} else {
				require.Error(t, got.err)
				assert.True(t, got.errored)
			}
			f.idle()
			f.end()
			f.stop()
		})
	}
}

// What is not on the list is never continued: the client gets an error event and an ending that is none.
func TestNotContinued(t *testing.T) {
	base := `"model":"m","stream":true,"max_tokens":12,"messages":[{"role":"user","content":"tell me"}]`
	for name, body := range map[string]string{
		"seed":            `{"seed":1,` + base + `}`,
		"logprobs":        `{"logprobs":true,` + base + `}`,
		"tools":           `{"tools":[{"type":"function","function":{"name":"f"}}],` + base + `}`,
		"response_format": `{"response_format":{"type":"json_object"},` + base + `}`,
		"unknown":         `{"surprise":1,` + base + `}`,
		"two answers":     `{"n":2,` + base + `}`,
		"image":           `{"model":"m","stream":true,"max_tokens":12,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,x"}}]}]}`,
		"off":             `{` + base + `}`,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newSimFleet(t, "vllm", 2, []uint64{2, 1}, func(_ int, c *Config) {
					if name == "off" {
						c.Continue = nil
					}
				})
				require.NoError(t, f.sims[1].Inject(enginesim.Fault{Kind: "reset", After: 4, Count: 1}))
				got := f.ask(chatPath, body)
				require.Error(t, got.err)
				assert.True(t, got.errored)
				assert.False(t, got.done)
				assert.Zero(t, f.sims[0].Stats().Counters)
				f.idle()
				f.end()
				f.stop()
			})
		})
	}
}

// A client that had begun the answer itself gets it continued in the same turn where the engine left that turn open.
func TestContinueOpenTurn(t *testing.T) {
	for _, dialect := range []string{"vllm", "llamacpp"} {
		for _, content := range []string{`"It was"`, `[{"type":"text","text":"It"},{"type":"text","text":" was"}]`} {
			synctest.Test(t, func(t *testing.T) {
				body := `{"model":"m","stream":true,"max_tokens":12,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"tell me"},{"role":"assistant","content":` + content + `}]}`
				f := newSimFleet(t, dialect, 2, []uint64{2, 1}, nil)
				want := f.ask(chatPath, body)
				for after := 1; after < 12; after += 5 {
					require.NoError(t, f.sims[1].Inject(enginesim.Fault{Kind: "reset", After: after, Count: 1}))
					f.ask(chatPath, body).whole(t, want, dialect)
				}
				f.end()
				f.stop()
			})
		}
	}
}

// Where all tokens are out and only the finish chunk is missing, it is written here and no engine is asked.
func TestContinueNothingLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newSimFleet(t, "vllm", 2, []uint64{2, 1}, nil)
		body := `{"model":"m","stream":true,"max_tokens":12,"messages":[{"role":"user","content":"tell me"}]}`
		want := f.ask(chatPath, body)
		first := f.sims[0].Stats().Counters
		require.NoError(t, f.sims[1].Inject(enginesim.Fault{Kind: "reset", After: 12, Count: 1}))
		f.ask(chatPath, body).whole(t, want, "nothing left")
		assert.Equal(t, first, f.sims[0].Stats().Counters)
		f.idle()
		f.end()
		f.stop()
	})
}

// An engine that cannot continue is passed over for one that can; without one the client is told.
func TestContinueNeedsAnAbleEngine(t *testing.T) {
	for _, able := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "vllm", 3, []uint64{3, 2, 1}, func(_ int, c *Config) {
				kind := func(b uint64) string {
					if b == 2 || b == 1 && !able {
						return "trtllm"
					}
					return "vllm"
				}
				for b := uint64(1); b <= 3; b++ {
					c.Table.SetMember(routing.Member{Boot: b, Node: fmt.Sprintf("n%d", b), Addr: peerAddr(int(b - 1)), Engine: kind(b)}, time.Now())
				}
				c.EngineKind = func() string { return kind(c.Table.Self().Boot()) }
			})
			body := `{"model":"m","stream":true,"max_tokens":12,"messages":[{"role":"user","content":"tell me"}]}`
			want := f.ask(chatPath, body)
			require.NoError(t, f.sims[2].Inject(enginesim.Fault{Kind: "reset", After: 4, Count: 1}))
			got := f.ask(chatPath, body)
			if able {
				got.whole(t, want, "passed over")
			} else {
				require.Error(t, got.err)
				assert.True(t, got.errored)
			}
			f.idle()
			f.end()
			f.stop()
		})
	}
}

func TestContinueBody(t *testing.T) {
	for _, c := range []struct {
		was, text, fields, want string
		chat, open              bool
		left                    int
	}{
		{was: `{"a":[1, 2],"messages":[{"role":"user","content":"x"}],"max_tokens":9,"max_tokens":10}`, text: "é\n\"", chat: true, left: 3, fields: `"continue_final_message":true`,
			want: `{"a":[1, 2],"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"é\n\""}],"max_tokens":3,"continue_final_message":true}`},
		{was: `{"messages":[{"content":"so","role":"assistant"}],"max_completion_tokens":5,"max_tokens":null}`, text: " on", chat: true, open: true, left: 2,
			want: `{"messages":[{"content":"so on","role":"assistant"}],"max_completion_tokens":2,"max_tokens":null}`},
		{was: `{"prompt":"a","Prompt":1}`, text: "b", want: `{"prompt":"ab","Prompt":1}`},
	} {
		got, err := continueBody([]byte(c.was), c.chat, c.open, c.text, c.left, c.fields)
		require.NoError(t, err)
		assert.JSONEq(t, c.want, string(got))
	}
	for _, was := range []string{`[]`, `{"messages":[]}`, `{"messages":"x"}`, `{`, `{"messages":[{"role":"assistant","content":7}]}`} {
		_, err := continueBody([]byte(was), true, true, "x", 0, "")
		require.Error(t, err, was)
	}
}

// afterwards picks in order; once something was tried it finds nobody usable before a time.
type afterwards struct {
	inOrder
	usable time.Time
}

func (o *afterwards) Pick(s *routing.Snapshot, r *routing.Request, now time.Time, rnd *rand.Rand) routing.Decision {
	if len(r.Tried) > 0 && now.Before(o.usable) {
		return routing.Decision{Reason: routing.ReasonNoneUsable}
	}
	return o.inOrder.Pick(s, r, now, rnd)
}

// Where no replica is usable for a moment the client waits; after five seconds it is told.
func TestContinueWaitsForAReplica(t *testing.T) {
	for _, away := range []time.Duration{2 * time.Second, 8 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "vllm", 2, nil, nil)
			p := &afterwards{inOrder: inOrder{2, 1}}
			f.agents[0].cfg.Policy = p
			want := f.ask(chatPath, continuable[chatPath])
			p.usable = time.Now().Add(away)
			start := time.Now()
			require.NoError(t, f.sims[1].Inject(enginesim.Fault{Kind: "reset", After: 2, Count: 1}))
			got := f.ask(chatPath, continuable[chatPath])
			if away < continueFor {
				got.whole(t, want, "after a while")
			} else {
				require.Error(t, got.err)
				assert.True(t, got.errored)
				assert.Less(t, time.Since(start), continueFor+time.Second)
			}
			f.idle()
			f.end()
			f.stop()
		})
	}
}

// A client that hangs up while its stream is being continued, or waits for that, frees the engines.
func TestContinueHangUp(t *testing.T) {
	for _, after := range []time.Duration{200 * time.Millisecond, 4 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "vllm", 2, nil, nil)
			f.agents[0].cfg.Policy = &afterwards{inOrder: inOrder{2, 1}, usable: time.Now().Add(2 * time.Second)}
			require.NoError(t, f.sims[1].Inject(enginesim.Fault{Kind: "reset", After: 2, Count: 1}))
			ctx, cancel := context.WithTimeout(t.Context(), after)
			defer cancel()
			resp, err := f.post(ctx, strings.Replace(continuable[chatPath], `"max_tokens":12`, `"max_tokens":1000`, 1))
			require.NoError(t, err)
			_, err = io.ReadAll(resp.Body)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			time.Sleep(200 * time.Millisecond)
			for i, sim := range f.sims {
				assert.Zero(t, sim.Stats().Calls, "engine %d", i+1)
			}
			f.idle()
			assert.Equal(t, outcomeCancel, f.lastPick().Outcome)
			assert.EqualValues(t, 1, f.metrics(0).Continues["reset client_cancel"])
			f.end()
			f.stop()
		})
	}
}

// An engine that was declared dead loses what is silent there, before the limit for silence and whether or not content came;
// streams that flow are left alone.
func TestEngineLost(t *testing.T) {
	for _, order := range [][]uint64{{1, 2}, {2, 1}} {
		synctest.Test(t, func(t *testing.T) {
			f := newSimFleet(t, "vllm", 2, order, nil)
			body := strings.Replace(continuable[chatPath], `"max_tokens":12`, `"max_tokens":600`, 1)
			want := f.ask(chatPath, body)
			p, sim := f.agents[order[0]-1], f.sims[order[0]-1]
			for i := range 100 {
				time.AfterFunc(time.Duration(i)*100*time.Millisecond, p.EngineLost)
			}
			f.ask(chatPath, body).whole(t, want, "flows")
			assert.Zero(t, f.continued())

			start := time.Now()
			time.AfterFunc(200*time.Millisecond, func() { _ = sim.Inject(enginesim.Fault{Kind: "hang"}) })
			time.AfterFunc(3*time.Second, p.EngineLost)
			f.ask(chatPath, body).whole(t, want, "hangs behind content")
			assert.EqualValues(t, 1, f.continued())
			time.AfterFunc(3*time.Second, p.EngineLost)
			f.ask(chatPath, body).whole(t, want, "hangs before content")
			assert.Less(t, time.Since(start), 32*time.Second+2*3*time.Second)
			sim.Clear("")
			f.idle()
			f.end()
			f.stop()
		})
	}
}
