package proxy

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

const okAnswer = `{"id":"c1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}`

// retryCase is one row of design 6.7: what the first replica does, and who must have answered.
type retryCase struct {
	name   string
	first  func(n int, w http.ResponseWriter, r *http.Request)
	header []string

	status  int    // what the client gets
	second  int    // runs at the second replica
	reason  string // retry counted; "" = none
	outcome string
}

var retryCases = []retryCase{
	{name: "429 moves", first: reply(429, "busy"), status: 200, second: 1, reason: retryBusy, outcome: outcomeOK},
	{name: "503 moves", first: reply(503, "busy"), status: 200, second: 1, reason: retryBusy, outcome: outcomeOK},
	{name: "not run moves", first: reply(500, "cannot schedule new futures after shutdown"), status: 200, second: 1, reason: retryBusy, outcome: outcomeOK},
	{name: "death told in the answer is replayed", first: reply(500, "EngineDeadError"), status: 200, second: 1, reason: retryError, outcome: outcomeOK},
	{name: "other 500 stays", first: reply(500, "boom"), status: 500, outcome: outcomeServerError},
	{name: "502 stays", first: reply(502, "boom"), status: 502, outcome: outcomeServerError},
	{name: "504 stays", first: reply(504, "boom"), status: 504, outcome: outcomeServerError},
	{name: "idempotent 500 moves", first: reply(500, "boom"), header: []string{"Idempotency-Key", "k"}, status: 200, second: 1, reason: retryIdempotent, outcome: outcomeOK},
	{name: "400 stays", first: reply(400, "bad"), status: 400, outcome: outcomeClientError},
	{name: "404 stays", first: reply(404, "bad"), status: 404, outcome: outcomeClientError},
	{name: "409 stays", first: reply(409, "bad"), status: 409, outcome: outcomeClientError},
	{name: "422 stays", first: reply(422, "bad"), status: 422, outcome: outcomeClientError},
	{name: "death before the head is replayed", first: func(int, http.ResponseWriter, *http.Request) { time.Sleep(2 * time.Second); die() },
		status: 200, second: 1, reason: retryCut, outcome: outcomeOK},
	{name: "no first byte is not replayed", first: func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		status: 504, outcome: outcomeTimeout},
}

func reply(status int, body string) func(int, http.ResponseWriter, *http.Request) {
	return func(_ int, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "7")
		w.Header().Set("X-Ratelimit-Remaining-Requests", "0")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// vllmReplies is the part of the engine's table that the tests need.
func vllmReplies(_ string, status int, body []byte) ReplyClass {
	switch {
	case status == 500 && strings.Contains(string(body), "cannot schedule new futures"):
		return ReplyNotRun
	case status == 500 && strings.Contains(string(body), "EngineDeadError"):
		return ReplyDead
	}
	return ReplyOther
}

// C31, C33, C47: what moves, what is replayed, and what is not, through the own engine and through a peer.
func TestC31RetryRules(t *testing.T) {
	tune := func(_ int, c *Config) { c.Reply, c.FirstByteTimeout = vllmReplies, 30*time.Second }
	for _, c := range retryCases {
		for _, order := range [][]uint64{{1, 2}, {2, 1}, {2, 3}} {
			t.Run(fmt.Sprintf("%s %v", c.name, order), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					first, second := engine(c.first), answers(200, okAnswer)
					es := []http.Handler{second, second, second}
					es[order[0]-1] = first
					f := newFleet(t, order, tune, es...)
					resp, text, err := f.get(chatBody(false), c.header...)
					require.NoError(t, err)
					assert.Equal(t, c.status, resp.StatusCode, text)
					assert.Equal(t, 1, first.count())
					assert.Equal(t, c.second, second.count())
					total := uint64(0)
					m := f.metrics(0)
					for _, n := range m.Retries {
						total += n
					}
					if c.reason != "" {
						assert.EqualValues(t, 1, m.Retries[c.reason])
						assert.EqualValues(t, 1, total)
					} else {
						assert.Zero(t, total)
					}
					assert.EqualValues(t, 1, m.EntryByOutcome[c.outcome], "%v", m.EntryByOutcome)
					f.idle()
				})
			})
		}
	}
}

// C33, C98: with nobody better the last refusal is passed on unchanged, its headers too.
func TestC33LastRefusalIsPassedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := engine(reply(503, `{"error":{"message":"a"}}`)), engine(reply(429, `{"error":{"message":"b"}}`))
		f := newFleet(t, []uint64{1, 2}, nil, a, b)
		resp, text, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 429, resp.StatusCode)
		sameBytes(t, `{"error":{"message":"b"}}`, text)
		assert.Equal(t, "7", resp.Header.Get("Retry-After"))
		assert.Equal(t, "0", resp.Header.Get("X-Ratelimit-Remaining-Requests"))
		assert.Empty(t, resp.Header.Get(headerReason), "an engine's answer is not ours")
		assert.Equal(t, 1, a.count())
		assert.Equal(t, 1, b.count())
		assert.EqualValues(t, 1, f.metrics(0).EntryByOutcome[outcomeBusy])
		f.idle()
	})
}

// C32: the second replica gets the complete body, for each size and framing.
func TestC32SecondGetsTheWholeBody(t *testing.T) {
	for _, size := range []int{0, 1 << 10, 20 << 20} {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d chunked=%v", size, chunked), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					e := answers(200, okAnswer)
					f := newFleet(t, []uint64{2, 1}, nil, e, answers(200, "never"))
					f.net.m[peerAddr(1)].Close() // the peer's agent is gone
					body := ""
					if size > 0 {
						body = `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("a", size) + `"}]}`
					}
					var rd io.Reader = strings.NewReader(body)
					if chunked {
						rd = io.MultiReader(rd)
					}
					resp, err := f.hc.Post("http://"+f.clients[0]+chatPath, "application/json", rd)
					require.NoError(t, err)
					assert.Equal(t, 200, resp.StatusCode)
					_ = resp.Body.Close()
					require.Len(t, e.bodies, 1)
					assert.Equal(t, sha256.Sum256([]byte(body)), sha256.Sum256([]byte(e.bodies[0])))
					assert.EqualValues(t, 1, f.metrics(0).Retries[retryDial])
					f.idle()
				})
			})
		}
	}
}

// C34: when everything is failing the budget keeps the repeats down.
func TestC34BudgetBoundsRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := []*scripted{engine(reply(503, "busy")), engine(reply(503, "busy")), engine(reply(503, "busy"))}
		f := newFleet(t, []uint64{1, 2, 3}, nil, es[0], es[1], es[2])
		start := time.Now()
		for range 200 {
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			require.Equal(t, 503, resp.StatusCode)
			time.Sleep(50 * time.Millisecond)
		}
		runs := es[0].count() + es[1].count() + es[2].count()
		most := 200 + 0.1*200 + 3 + time.Since(start).Seconds()/10
		assert.LessOrEqual(t, float64(runs), most)
		assert.Greater(t, runs, 210, "some were repeated")
		assert.NotZero(t, f.metrics(0).RetryBudgetExhausted)
	})
}

// At most two repeats, each elsewhere; a cut is replayed once.
func TestAtMostTwoRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var es []http.Handler
		for range 5 {
			es = append(es, engine(reply(503, "busy")))
		}
		f := newFleet(t, []uint64{1, 2, 3, 4, 5}, nil, es...)
		resp, _, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 503, resp.StatusCode)
		runs := []int{}
		for _, e := range es {
			runs = append(runs, e.(*scripted).count())
		}
		assert.Equal(t, []int{1, 1, 1, 0, 0}, runs)
	})
}

// An engine that dies may have run the request until then, so that is a replay, of which there is one.
func TestDeadEngineIsReplayedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var es []http.Handler
		for range 3 {
			es = append(es, engine(reply(500, "EngineDeadError")))
		}
		f := newFleet(t, []uint64{1, 2, 3}, func(_ int, c *Config) { c.Reply = vllmReplies }, es...)
		resp, _, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 500, resp.StatusCode)
		runs := []int{}
		for _, e := range es {
			runs = append(runs, e.(*scripted).count())
		}
		assert.Equal(t, []int{1, 1, 0}, runs)
	})
}

// Half of the network is gone and no record says so yet: whoever could not be connected to twice runs at the entry, also when
// the budget for repeats is used up. If the entry's engine cannot take it, the third goes elsewhere as ever.
func TestUnreachableGoesHome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var es []http.Handler
		for range 5 {
			es = append(es, answers(200, "{}"))
		}
		f := newFleet(t, []uint64{2, 3, 4, 5, 1}, nil, es...)
		for i := 1; i < 5; i++ {
			f.net.mu.Lock()
			delete(f.net.m, peerAddr(i))
			f.net.mu.Unlock()
		}
		table := f.agents[0].cfg.Table
		table.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
		table.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, time.Now())
		const requests = 50 // a burst, so that no budget grows meanwhile
		for range requests {
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			assert.Equal(t, 200, resp.StatusCode)
		}
		assert.Equal(t, requests, es[0].(*scripted).count())
		assert.EqualValues(t, 2*requests, f.metrics(0).Retries[retryDial])

		table.Update(routing.Report{Boot: 1, Seq: 2, State: routing.StateWarming, Heartbeat: time.Hour}, time.Now())
		resp, _, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 503, resp.StatusCode)
		assert.Equal(t, requests, es[0].(*scripted).count())
	})
}

// A request that killed two replicas is not tried again, and its body is refused for a minute.
func TestDeadlyRequest(t *testing.T) {
	for _, order := range [][]uint64{{1, 2, 3}, {2, 3, 1}} {
		synctest.Test(t, func(t *testing.T) {
			killer := func(_ int, _ http.ResponseWriter, r *http.Request) { time.Sleep(time.Second * 2); die() }
			es := []*scripted{engine(killer), engine(killer), engine(killer)}
			f := newFleet(t, order, nil, es[0], es[1], es[2])
			for range 2 {
				resp, text, err := f.get(chatBody(true))
				require.NoError(t, err)
				assert.Equal(t, 500, resp.StatusCode)
				assert.Equal(t, "false", resp.Header.Get("X-Should-Retry"))
				assert.Equal(t, "deadly", resp.Header.Get(headerReason))
				assert.Contains(t, text, `"error"`)
			}
			assert.Equal(t, 2, es[0].count()+es[1].count()+es[2].count())
			resp, _, err := f.get(strings.Replace(chatBody(true), "hello", "other", 1))
			require.NoError(t, err)
			assert.Equal(t, 500, resp.StatusCode, "another body is tried")
			assert.Equal(t, 4, es[0].count()+es[1].count()+es[2].count())
			time.Sleep(deadlyFor + time.Second)
			_, _, err = f.get(chatBody(true))
			require.NoError(t, err)
			assert.Equal(t, 6, es[0].count()+es[1].count()+es[2].count(), "forgotten after a minute")
			f.idle()
		})
	}
}

// An answer that is not streamed may be long past its prompt when its replica dies of something else: it takes four deaths,
// over all requests of the body, before it is called deadly.
func TestDeadlyUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		killer := func(_ int, _ http.ResponseWriter, _ *http.Request) { time.Sleep(time.Second * 2); die() }
		es := []*scripted{engine(killer), engine(killer), engine(killer)}
		f := newFleet(t, []uint64{1, 2, 3}, nil, es[0], es[1], es[2])
		for i, want := range []int{502, 500, 500} {
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			assert.Equal(t, want, resp.StatusCode, "request %d", i)
		}
		assert.Equal(t, 4, es[0].count()+es[1].count()+es[2].count())
		f.idle()
	})
}

// C36: a kept connection that died while idle is replaced without anybody noticing; each body runs once.
func TestC36DeadKeptConnection(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := answers(200, okAnswer)
		e.idle = time.Second
		f := newFleet(t, order, nil, pair(target, e)...)
		for i := range 200 {
			resp, _, err := f.get(chatBody(false))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
			time.Sleep(900*time.Millisecond + time.Duration(i)*time.Millisecond)
		}
		assert.Equal(t, 200, e.count())
		assert.Empty(t, e.last().Get("Idempotency-Key"))
		assert.Empty(t, e.last().Get("X-Idempotency-Key"))
		f.idle()
	})
}

// The rules of the budget, by themselves.
func TestRetryBudget(t *testing.T) {
	now := time.Now()
	b := newRetryBudget(0.1, now)
	for range 3 {
		assert.True(t, b.take(now))
	}
	assert.False(t, b.take(now), "starts with 3")
	for range 11 {
		b.first(now)
	}
	assert.True(t, b.take(now), "ten first attempts pay for one")
	assert.False(t, b.take(now))
	assert.False(t, b.take(now.Add(8*time.Second)))
	assert.True(t, b.take(now.Add(10*time.Second)), "one comes every ten seconds")
	tokens, _ := b.state(now.Add(time.Hour))
	assert.InDelta(t, 10, tokens, 0, "never more than ten")
}

func TestRetryStateAllow(t *testing.T) {
	now := time.Now()
	empty := func() *retryBudget { return &retryBudget{max: 10, at: now} }
	var s retryState
	_, ok := s.allow(verdictCut, false, empty(), now)
	assert.True(t, ok, "a replay after a death is free")
	_, ok = s.allow(verdictCut, false, newRetryBudget(0.1, now), now)
	assert.False(t, ok, "and happens once")
	_, ok = s.allow(verdictNoConnect, false, empty(), now)
	assert.True(t, ok)
	_, ok = s.allow(verdictNoConnect, false, newRetryBudget(0.1, now), now)
	assert.False(t, ok, "two repeats in all")
	for range maxRefusals {
		_, ok = s.allow(verdictRefused, false, empty(), now)
		assert.True(t, ok, "agents' refusals are no attempts")
	}
	_, ok = s.allow(verdictRefused, false, empty(), now)
	assert.False(t, ok)
	s = retryState{}
	for _, v := range []verdict{verdictFailed, verdictTimeout, verdictBroken, verdictDone} {
		_, ok = s.allow(v, false, newRetryBudget(0.1, now), now)
		assert.False(t, ok, "%d", v)
	}
	_, ok = s.allow(verdictBusy, false, empty(), now)
	assert.False(t, ok, "a busy answer costs a token")
}

// A short answer with a declared length reaches the client as a whole or not at all: cut in the middle it is replayed,
// and so is one in which the engine says that it was aborted.
func TestShortAnswerIsWholeOrReplayed(t *testing.T) {
	aborted := strings.Replace(okAnswer, `"stop"`, `"abort"`, 1)
	for name, first := range map[string]func(int, http.ResponseWriter, *http.Request){
		"cut in the body": func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "1000")
			say(w, okAnswer[:20])
			die()
		},
		"cut behind the head": func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Content-Length", "1000")
			w.WriteHeader(200)
			flush(w)
			die()
		},
		"aborted": func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, aborted)
		},
		"a long one, aborted": func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			long := strings.Replace(aborted, `"hi"`, `"`+strings.Repeat("hello ", 20_000)+`"`, 1)
			w.Header().Set("Content-Length", fmt.Sprint(len(long)))
			_, _ = io.WriteString(w, long)
		},
	} {
		for _, order := range [][]uint64{{1, 2}, {2, 1}, {2, 3}} {
			t.Run(fmt.Sprint(name, order), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					good := answers(200, okAnswer)
					es := []http.Handler{good, good, good}
					es[order[0]-1] = engine(first)
					f := newFleet(t, order, nil, es...)
					resp, text, err := f.get(chatBody(false))
					require.NoError(t, err)
					assert.Equal(t, 200, resp.StatusCode)
					sameBytes(t, okAnswer, text)
					assert.Equal(t, 1, good.count())
					f.idle()

					f.agents[0].cfg.Policy = inOrder{order[0]}
					resp, text, err = f.get(chatBody(false))
					require.NoError(t, err)
					assert.Equal(t, 502, resp.StatusCode, text)
					f.idle()
				})
			})
		}
	}
}

// A full outage of answers: every engine says that it is busy, every request would like to be tried elsewhere. Counted at the
// engines, there are no more repeats than a tenth of the first attempts, and what each agent starts with and gets with time.
func TestRetriesInAnOutage(t *testing.T) {
	for name, refuse := range map[string]func(int, http.ResponseWriter, *http.Request){
		"busy": reply(503, `{"error":{"message":"busy"}}`), "full": reply(429, `{"error":{"message":"full"}}`),
		"not run": reply(500, "cannot schedule new futures after shutdown"),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*scripted{engine(refuse), engine(refuse), engine(refuse)}
				f := newFleet(t, []uint64{1, 2, 3}, func(_ int, c *Config) { c.Reply = vllmReplies }, engines[0], engines[1], engines[2])
				const requests, agents = 900, 3
				start := time.Now()
				for i := range requests {
					time.Sleep(100 * time.Millisecond)
					req, err := http.NewRequest("POST", "http://"+f.clients[i%agents]+chatPath, strings.NewReader(chatBody(i%2 == 0)))
					require.NoError(t, err)
					resp, err := f.hc.Do(req)
					require.NoError(t, err)
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
					assert.GreaterOrEqual(t, resp.StatusCode, 429)
				}
				at := 0
				for _, e := range engines {
					at += e.count()
				}
				repeats, most := at-requests, requests/10+agents*(3+int(time.Since(start).Seconds()/10))
				t.Logf("%d repeats of %d first attempts in %v; %d are allowed", repeats, requests, time.Since(start), most)
				assert.LessOrEqual(t, repeats, most)
				assert.Positive(t, repeats)
				f.idle()
			})
		})
	}
}
