package proxy

import (
	"context"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestScoreQuestion(t *testing.T) {
	in := routing.Request{Class: 3, Service: routing.ServeChat, PromptTokens: 70_000, MaxTokens: 12,
		Prefix: []uint64{1, 2<<32 | 7, 3 | routing.FineBlock}, Ends: []uint32{100, 612, 645}}
	b := appendScoreQuestion(nil, &in)
	var out routing.Request
	require.True(t, readScoreQuestion(b, &out, nil, nil))
	in.Prefix = []uint64{1, 7, 3 | routing.FineBlock} // the low halves, as digests have them
	assert.Equal(t, in, out)
	for n := range b {
		assert.False(t, readScoreQuestion(b[:n], &out, nil, nil), "%d bytes", n)
	}
}

func FuzzScoreQuestion(f *testing.F) {
	f.Add(appendScoreQuestion(nil, &routing.Request{Prefix: []uint64{1, 2}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r routing.Request
		if readScoreQuestion(b, &r, nil, nil) && len(r.Prefix)*6 > len(b) {
			t.Fatal("more blocks than bytes")
		}
	})
}

// linkFleet is a fleet whose agents know each other's records and ask.
func linkFleet(t *testing.T, tune func(i int, c *Config), engines ...http.Handler) *fleet {
	t.Helper()
	auto, err := routing.NewPolicy("auto")
	require.NoError(t, err)
	f := newFleet(t, nil, func(i int, c *Config) {
		now := time.Now()
		for j := range engines {
			c.Table.SetMember(routing.Member{Boot: uint64(j + 1), Node: peerAddr(j), Addr: peerAddr(j), Version: routing.AskVersion}, now)
			c.Table.SetModels(uint64(j+1), []routing.Model{{ID: "m"}}, 0, now)
			c.Table.Update(routing.Report{Boot: uint64(j + 1), Seq: 1, State: routing.StateReady, Heartbeat: time.Hour,
				PendingTokens: routing.Some(0), Running: routing.Some(0), PrefillRate: routing.Some(10000.0)}, now)
		}
		c.Policy = auto
		if tune != nil {
			tune(i, c)
		}
	}, engines...)
	return f
}

// busy gives an agent's own replica a queue that only it knows of.
func busy(f *fleet, i, tokens int) {
	f.agents[i].cfg.Table.SetLive(func() routing.Live {
		return routing.Live{PendingTokens: tokens, Waiting: 1, PrefillRate: 10000}
	})
}

// What gossip has not told yet is asked: the request goes to the one replica that is free.
func TestAskingFindsTheFreeReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engines := []*scripted{}
		hs := []http.Handler{}
		for range 4 {
			e := streams(0, roleChunk, chunk("a"), finishChunk, doneChunk)
			engines, hs = append(engines, e), append(hs, e)
		}
		f := linkFleet(t, nil, hs...)
		busy(f, 0, 5000)
		busy(f, 1, 4000)
		busy(f, 3, 3000)
		start := time.Now()
		for range 3 {
			resp, _, err := f.get(chatBody(true))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
		}
		assert.Equal(t, 3, engines[2].count(), "the free one")
		m := f.metrics(0)
		assert.EqualValues(t, 3, m.Ask.Requests)
		assert.EqualValues(t, 9, m.Ask.Answered)
		assert.Zero(t, m.Ask.Missed)
		assert.Less(t, time.Since(start), 100*time.Millisecond)
		rec := f.agents[0].Picks("")[0]
		assert.Equal(t, 3, rec.Attempts[0].Asked)
		assert.Equal(t, 4, rec.Attempts[0].Answered)
		assert.Equal(t, routing.ReasonAsked, rec.Attempts[0].Reason)
		f.idle()
	})
}

// A replica that has become busier between its answer and the request's arrival refuses once; then whoever is chosen takes
// it, whatever it costs there. No attempt is charged.
func TestTargetRefusesOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			grows  []int // pending tokens at the third replica, from one look to the next
			served int
			turned uint64
		}{
			"another asker was faster":      {[]int{0, 9000}, 1, 1},
			"it is as it said":              {[]int{0}, 2, 0},
			"worse, but still the best one": {[]int{0, 3900}, 2, 0},
			"twice":                         {[]int{0, 9000, 0, 9000}, 2, 1},
		} {
			engines := []*scripted{}
			hs := []http.Handler{}
			for range 3 {
				e := streams(0, roleChunk, chunk("a"), finishChunk, doneChunk)
				engines, hs = append(engines, e), append(hs, e)
			}
			f := linkFleet(t, nil, hs...)
			busy(f, 0, 50_000)
			busy(f, 1, 4000)
			looks := 0
			f.agents[2].cfg.Table.SetLive(func() routing.Live {
				n := c.grows[min(looks, len(c.grows)-1)]
				looks++
				return routing.Live{PendingTokens: n, PrefillRate: 10000}
			})
			resp, _, err := f.get(chatBody(true))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode, name)
			assert.Equal(t, 1, engines[c.served].count(), name)
			m := f.metrics(0)
			assert.Equal(t, c.turned, m.Ask.Turned, name)
			assert.Zero(t, m.Retries[retryRefused]+m.Retries[retryBusy], name)
			f.idle()
			f.stop()
		}
	})
}

// Who stays asks nobody: an idle fleet sends no questions.
func TestIdleFleetAsksNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := linkFleet(t, nil, answers(200, "{}"), answers(200, "{}"))
		for range 3 {
			_, _, err := f.get(chatBody(false))
			require.NoError(t, err)
		}
		assert.Zero(t, f.metrics(0).Ask.Requests)
		assert.Empty(t, f.agents[0].questions.asked)
	})
}

// A peer that hangs holds nobody longer than the limit, and is soon not asked any more.
func TestHungPeerCostsTheLimitOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := []*scripted{streams(0, roleChunk, chunk("a"), finishChunk, doneChunk), streams(0, roleChunk, chunk("a"), finishChunk, doneChunk),
			streams(0, roleChunk, chunk("a"), finishChunk, doneChunk)}
		var hung *hangingLinks
		f := linkFleet(t, func(i int, c *Config) {
			if i == 0 {
				hung = &hangingLinks{dial: c.Dial, addr: peerAddr(2)}
				c.Dial = hung.Dial
			}
		}, e[0], e[1], e[2])
		busy(f, 0, 50_000)
		for i := range 6 {
			resp, _, err := f.get(chatBody(true))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
			a := f.agents[0].Picks("")[0].Attempts[0]
			assert.LessOrEqual(t, a.AskMS, 6.0)
			if i < askMisses {
				assert.Equal(t, 2, a.Asked)
				assert.GreaterOrEqual(t, a.AskMS, 5.0)
			} else {
				assert.Equal(t, 1, a.Asked, "left alone for a while")
				assert.Less(t, a.AskMS, 1.0)
			}
		}
		assert.EqualValues(t, 3, f.metrics(0).Ask.Missed)
		time.Sleep(askPause)
		_, _, err := f.get(chatBody(true))
		require.NoError(t, err)
		assert.Equal(t, 2, f.agents[0].Picks("")[0].Attempts[0].Asked, "asked again after the pause")
		hung.close()
	})
}

// hangingLinks gives the dialler of one address connections on which nothing ever comes back.
type hangingLinks struct {
	dial func(context.Context, string, string) (net.Conn, error)
	addr string
	mu   sync.Mutex
	ends []net.Conn
}

func (h *hangingLinks) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if addr != h.addr {
		return h.dial(ctx, network, addr)
	}
	a, b := net.Pipe()
	h.mu.Lock()
	h.ends = append(h.ends, b)
	h.mu.Unlock()
	return a, nil
}

func (h *hangingLinks) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.ends {
		_ = c.Close()
	}
}

// A draining agent refuses, and is not taken even if it would be the cheapest.
func TestDrainingAgentRefusesTheQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := streams(0, roleChunk, chunk("a"), finishChunk, doneChunk)
		f := linkFleet(t, nil, answers(500, "{}"), answers(500, "{}"), e)
		busy(f, 0, 50_000)
		busy(f, 2, 5_000)
		f.agents[1].SetDraining(true)
		resp, _, err := f.get(chatBody(true))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		assert.Equal(t, 1, e.count())
		assert.EqualValues(t, 1, f.metrics(0).Ask.Refused)
	})
}

// Answers carry the sender's load record.
func TestAnswersCarryRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var got []string
		e := streams(0, roleChunk, chunk("a"), finishChunk, doneChunk)
		f := linkFleet(t, func(i int, c *Config) {
			c.Record = func() []byte { return []byte(peerAddr(i)) }
			c.OnRecord = func(_ uint64, b []byte) {
				mu.Lock()
				defer mu.Unlock()
				if i == 0 {
					got = append(got, string(b))
				}
			}
		}, e, e, e)
		busy(f, 0, 50_000)
		_, _, err := f.get(chatBody(true))
		require.NoError(t, err)
		mu.Lock()
		defer mu.Unlock()
		slices.Sort(got)
		assert.Equal(t, []string{peerAddr(1), peerAddr(2)}, slices.Compact(got))
	})
}

// The link ends with the member, and with the proxy.
func TestLinksEndWithTheirMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := linkFleet(t, nil, answers(200, "{}"), answers(200, "{}"), answers(200, "{}"))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- f.agents[0].Run(ctx) }()
		p := f.agents[0]
		for boot := range uint64(2) {
			b, err := p.Ask(t.Context(), boot+2, time.Second, AskScore, appendScoreQuestion(nil, &routing.Request{}))
			require.NoError(t, err)
			require.Len(t, b, scoreAnswer)
		}
		p.cfg.Table.RemoveMember(2, time.Now())
		time.Sleep(6 * time.Second)
		p.questions.mu.Lock()
		assert.Len(t, p.questions.asked, 1)
		p.questions.mu.Unlock()
		_, err := p.Ask(t.Context(), 2, time.Second, AskScore, nil)
		assert.Error(t, err)
		cancel()
		assert.NoError(t, <-done)
		_, err = p.Ask(t.Context(), 3, time.Second, AskScore, nil)
		assert.Error(t, err)
	})
}

// BenchmarkAnswerScore is the asked agent's work.
func BenchmarkAnswerScore(b *testing.B) {
	tab := routing.NewTable(routing.Member{Boot: 1})
	d := routing.NewDigest(0)
	rnd := rand.New(rand.NewPCG(1, 2))
	prefix := make([]uint64, 16)
	for i := range prefix {
		prefix[i] = rnd.Uint64()
	}
	d.Touch(prefix, nil)
	tab.SetOwnDigest(d)
	p := &Proxy{cfg: Config{Table: tab}, metrics: newMetrics()}
	p.gate.account = &p.account
	q := appendScoreQuestion(nil, &routing.Request{PromptTokens: 8192, Prefix: prefix})
	reply := make([]byte, 0, 128)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := p.answerScore(q, reply); !ok {
			b.Fatal("no answer")
		}
	}
}
