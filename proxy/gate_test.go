package proxy

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// newTestGate is a gate whose engine computes 10,000 prompt tokens/s.
func newTestGate() *gate {
	g := &gate{account: &account{step: 0.02}, limit: 10, timeout: time.Second, metrics: gateMetrics{waited: newHistogram(heldBounds)}}
	g.account.prefill.Busy(time.Second)
	g.account.prefill.Finish(10_000)
	return g
}

func newHold(tokens int) *hold {
	return &hold{tokens: tokens, req: &routing.Request{PromptTokens: tokens}, ready: make(chan leave, 1)}
}

func TestGateRoom(t *testing.T) {
	now := time.Now()
	full := EngineView{RunLimit: routing.Some(4)}
	for _, c := range []struct {
		name    string
		view    EngineView
		inside  []int // prompt tokens of those at the engine
		running int   // of them with a first token
		tokens  int
		waited  time.Duration
		want    bool
	}{
		{"empty engine", EngineView{}, nil, 0, 1000, 0, true},
		{"a little prefill to do: 5 ms at 10,000/s is 50 tokens", EngineView{}, []int{50}, 0, 1000, 0, true},
		{"more than that", EngineView{}, []int{51}, 0, 1000, 0, false},
		{"it costs the one there less than it would wait: 30 ms", EngineView{}, []int{4000}, 0, 300, 0, true},
		{"more than that", EngineView{}, []int{4000}, 0, 301, 0, false},
		{"but two are there", EngineView{}, []int{2000, 2000}, 0, 300, 0, false},
		{"a long prompt that decodes already", EngineView{}, []int{8000}, 1, 1000, 0, true},
		{"full slots", full, []int{1, 1, 1, 1}, 4, 1000, 0, false},
		{"a free slot", full, []int{1, 1, 1}, 3, 1000, 0, true},
		{"slots that others took", EngineView{RunLimit: routing.Some(4), Foreign: 3}, []int{1}, 1, 1000, 0, false},
		{"no KV space", EngineView{KVUsed: routing.Some(0.98)}, []int{1}, 1, 1000, 0, false},
		{"the prompts let in since the reading fill the KV space", EngineView{KVUsed: routing.Some(0.5), KVCapacity: routing.Some(1000)}, []int{100, 380}, 2, 1000, 0, false},
		{"no KV space, but nothing is there", EngineView{KVUsed: routing.Some(0.98)}, nil, 0, 1000, 0, true},
		{"nobody came for it: a whole step is given", EngineView{}, []int{8000}, 0, 1000, routing.GatePatience, true},
		{"nobody came for it: but no more than that", EngineView{}, []int{8200}, 0, 1000, routing.GatePatience, false},
		{"nobody came for it: one more than the slots", full, []int{1, 1, 1, 1}, 4, 1000, routing.GatePatience, true},
		{"nobody came for it: not two", full, []int{1, 1, 1, 1, 1}, 5, 1000, routing.GatePatience, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newTestGate()
			g.view = c.view
			for i, n := range c.inside {
				p := g.enter(newHold(n), 10_000, 0, now)
				if i < c.running {
					g.over(p)
				}
			}
			h := newHold(c.tokens)
			if c.waited > 0 {
				h.since = now.Add(-c.waited)
			}
			assert.Equal(t, c.want, g.room(h, 10_000, 0, now))
		})
	}
}

func TestGateOrderAndCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		news := 0
		g.onHeld = func() { news++ }
		first, e := g.arrive(newHold(1000), 0, time.Now())
		require.Nil(t, e)
		require.NotNil(t, first)
		var held []*hold
		for range 3 {
			h := newHold(400)
			p, e := g.arrive(h, 0, time.Now())
			require.Nil(t, e)
			require.Nil(t, p)
			held = append(held, h)
		}
		n, tokens := g.load()
		assert.Equal(t, 3, n)
		assert.Equal(t, 1200, tokens)
		assert.Equal(t, 1, news, "0 to 1 is told at once")

		first.first(time.Now())
		p1, p2 := (<-held[0].ready).pass, (<-held[1].ready).pass
		assert.Empty(t, held[2].ready, "40 ms for two, and nobody behind it: more than 30")
		g.drop(held[2], time.Now()) // hung up
		n, tokens = g.load()
		assert.Zero(t, n+tokens)
		p1.done(time.Now())
		p2.first(time.Now())
		p2.done(time.Now())
		p2.done(time.Now())
		first.done(time.Now())
		assert.Zero(t, g.count+g.pending+len(g.inside))
		g.close()
	})
}

// A hang-up that meets the request's turn gives the place back.
// The digest knows what is held, however it leaves.
func TestDigestExpectsWhatIsHeld(t *testing.T) {
	g := newTestGate()
	d := routing.NewDigest(0)
	g.queue.digest = d
	first, e := g.arrive(newHold(1000), 0, time.Now())
	require.Nil(t, e)
	var held [3]*hold
	prefix := func(i int) []uint64 { return []uint64{1, uint64(10 + i)} }
	for i := range held {
		held[i] = newHold(400)
		held[i].req = &routing.Request{Prefix: prefix(i)}
		_, e := g.arrive(held[i], 0, time.Now())
		require.Nil(t, e)
		assert.Equal(t, 2, d.Match(prefix(i)))
	}
	g.drop(held[0], time.Now())
	assert.Equal(t, 1, d.Match(prefix(0)), "the others have the first block in common with it")
	first.done(time.Now())
	(<-held[1].ready).pass.done(time.Now())
	assert.Zero(t, d.Match(prefix(1)), "it is at the engine now, and noted as such by others")
	g.drain()
	assert.Zero(t, d.Match(prefix(2)))
	g.close()
}

func TestGateDropMeetsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		first, _ := g.arrive(newHold(1000), 0, time.Now())
		h := newHold(1000)
		_, _ = g.arrive(h, 0, time.Now())
		first.done(time.Now())
		require.Len(t, h.ready, 1)
		g.drop(h, time.Now())
		assert.Zero(t, g.count+g.pending)
		g.close()
	})
}

// Who waits for an engine that gives no sign goes on by the prediction, one decode step later at the most.
func TestGateGoesByThePrediction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		_, _ = g.arrive(newHold(2000), 0, time.Now()) // 200 ms at 10,000/s
		h := newHold(1000)
		start := time.Now()
		_, _ = g.arrive(h, 0, start)
		l := <-h.ready
		require.NotNil(t, l.pass)
		assert.LessOrEqual(t, time.Since(start), 230*time.Millisecond)
		assert.GreaterOrEqual(t, time.Since(start), 100*time.Millisecond)
		g.close()
	})
}

// The engine's own counter of first tokens speaks for answers that show none.
func TestGateBelievesTheEnginesCounter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, views := range map[string][2]EngineView{
			"counter":       {{FirstTokens: routing.Some(5.0)}, {FirstTokens: routing.Some(6.0)}},
			"nothing waits": {{}, {Waiting: routing.Some(0)}},
			"first reading": {{}, {FirstTokens: routing.Some(70.0), Waiting: routing.Some(0)}}, // of the counter, so it tells no difference
		} {
			g := newTestGate()
			g.account.prefill = routing.PrefillRate{}
			g.account.prefill.Busy(10 * time.Second)
			g.account.prefill.Finish(1000) // far too low
			views[0].At = time.Now()
			g.see(views[0], time.Now())
			long := newHold(2000)
			long.blind = true
			_, _ = g.arrive(long, 0, time.Now())
			h := newHold(1000)
			_, _ = g.arrive(h, 0, time.Now())
			time.Sleep(100 * time.Millisecond)
			require.Empty(t, h.ready, name)
			views[1].At = time.Now()
			g.see(views[1], time.Now())
			assert.Len(t, h.ready, 1, name)
			g.close()
		}
	})
}

// Where an engine does not say how many it runs at once, what waits there tells it; but every engine has requests that wait for
// their prefill's turn, or for the end of a step.
func TestGateTellsSlotsFromTurns(t *testing.T) {
	for _, c := range []struct {
		name    string
		pending int // prompt tokens at the engine
		ended   int // requests a reading, each 200 ms after the one before
		waiting int
		want    routing.Opt[int]
	}{
		{"eight slots, two seconds each", 400, 1, 2, routing.Some(9)},
		{"prompts that wait for their turn", 4000, 3, 3, routing.Opt[int]{}},
		{"one that waits for the end of a step", 200, 4, 1, routing.Opt[int]{}},
		{"nobody waits", 400, 1, 0, routing.Opt[int]{}},
	} {
		g := newTestGate()
		at := time.Now()
		for range 20 {
			g.pending, g.ended = c.pending, c.ended
			at = at.Add(200 * time.Millisecond)
			g.see(EngineView{At: at, Running: routing.Some(8), Waiting: routing.Some(c.waiting)}, at)
		}
		assert.Equal(t, c.want, g.runLimit(), c.name)
	}
}

func TestGateIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		g.limit = 2
		_, _ = g.arrive(newHold(50_000), 0, time.Now())
		for range 2 {
			_, e := g.arrive(newHold(10_000), 0, time.Now())
			require.Nil(t, e)
		}
		_, e := g.arrive(newHold(10_000), 0, time.Now())
		require.NotNil(t, e)
		assert.Equal(t, 429, e.Status)
		assert.Equal(t, 7*time.Second, e.RetryAfter, "70,000 tokens at 10,000/s")
		g.close()
	})
}

// slow is an engine that streams its first content after d.
func slow(d time.Duration) *scripted {
	return engine(func(_ int, w http.ResponseWriter, r *http.Request) {
		eventHead(w)
		select {
		case <-time.After(d):
		case <-r.Context().Done():
			return
		}
		say(w, roleChunk)
		say(w, chunk("a"))
		say(w, finishChunk)
		say(w, doneChunk)
	})
}

func longBody(tokens int, stream bool) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":%q}]}`, stream, strings.Repeat("word", tokens))
}

func TestHeldRequestEndsWithItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, remote := range []bool{false, true} {
			e := slow(time.Second)
			order := []uint64{1}
			if remote {
				order = []uint64{2}
			}
			f := newFleet(t, order, nil, e, e)
			target := f.agents[order[0]-1]
			go func() { _, _, _ = f.get(longBody(2000, true)) }()
			synctest.Wait()
			require.Equal(t, 1, e.count())
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				resp, err := f.post(ctx, longBody(2000, true))
				if err == nil {
					_, err = io.ReadAll(resp.Body)
					_ = resp.Body.Close()
				}
				done <- err
			}()
			synctest.Wait()
			assert.Equal(t, 1, target.Load().Held)
			assert.Equal(t, 1, e.count())
			cancel()
			assert.Error(t, <-done)
			synctest.Wait()
			assert.Zero(t, target.Load().Held)
			time.Sleep(2 * time.Second)
			assert.Equal(t, 1, e.count(), "it never reached the engine")
			f.idle()
			f.stop()
		}
	})
}

func TestHeldTooLongIs429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, order := range [][]uint64{{1}, {2, 1}} {
			e := slow(time.Hour)
			f := newFleet(t, order, func(_ int, c *Config) { c.QueueTimeout = 300 * time.Millisecond }, e, e)
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _, _ = f.post(ctx, longBody(20_000, true)) }()
			synctest.Wait()
			start := time.Now()
			resp, body, err := f.get(longBody(10, true))
			require.NoError(t, err)
			assert.Equal(t, 429, resp.StatusCode)
			assert.Contains(t, body, "queue_timeout")
			assert.NotEmpty(t, resp.Header.Get("Retry-After"))
			assert.InDelta(t, 300, time.Since(start).Milliseconds(), 20)
			assert.EqualValues(t, 1, f.metrics(int(order[0]-1)).Gate.TimedOut)
			// That it waited too long is no 429 of an engine, after which its replica would get nothing for a second.
			synctest.Wait()
			assert.Equal(t, routing.OutcomeCancelled.String(), f.agents[0].Picks("")[0].Attempts[0].Result)
			cancel()
			f.idle()
			f.stop()
		}
	})
}

// The first-byte limit counts from the start at the engine: waiting at a gate does not use it up.
func TestFirstByteLimitCountsFromTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := slow(800 * time.Millisecond)
		f := newFleet(t, []uint64{2}, func(_ int, c *Config) { c.FirstByteTimeout = time.Second }, e, e)
		withVersion(f)
		var wg sync.WaitGroup
		for range 2 { // the second waits for the first, a second in all and more
			wg.Go(func() {
				resp, _, err := f.get(longBody(9000, true))
				assert.NoError(t, err)
				assert.Equal(t, 200, resp.StatusCode)
			})
			synctest.Wait()
		}
		wg.Wait()
		assert.Equal(t, 2, e.count())
		assert.EqualValues(t, 1, f.metrics(1).Gate.Held)
		f.idle()
	})
}

// withVersion makes all members announce what this build speaks.
func withVersion(f *fleet) {
	for _, p := range f.agents {
		for _, m := range p.cfg.Table.Snapshot().Peers() {
			x := m.Member()
			x.Version = routing.AskVersion
			p.cfg.Table.SetMember(x, time.Now())
		}
	}
}

// A drain hands what is held to the others, whoever is the entry.
func TestDrainHandsHeldRequestsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, order := range [][]uint64{{1, 2}, {2, 1}} {
			busyOne, free := slow(5*time.Second), streams(0, roleChunk, chunk("b"), finishChunk, doneChunk)
			engines := []http.Handler{busyOne, free}
			if order[0] == 2 {
				engines = []http.Handler{free, busyOne}
			}
			f := newFleet(t, order, nil, engines...)
			victim := f.agents[order[0]-1]
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _, _ = f.post(ctx, longBody(9000, true)) }()
			synctest.Wait()
			done := make(chan string, 1)
			go func() {
				_, body, _ := f.get(longBody(10, true))
				done <- body
			}()
			synctest.Wait()
			require.Equal(t, 1, victim.Load().Held)
			f.agents[0].cfg.Policy = preferOther{inOrder(order), order[0]}
			victim.SetDraining(true)
			assert.Contains(t, <-done, `"content":"b"`)
			assert.Equal(t, 1, busyOne.count())
			cancel()
			f.idle()
			f.stop()
		}
	})
}

// preferOther picks another than not, as policies do with a draining replica.
type preferOther struct {
	inOrder
	not uint64
}

func (o preferOther) Pick(s *routing.Snapshot, r *routing.Request, now time.Time, rnd *rand.Rand) routing.Decision {
	q := *r
	q.Tried = append([]uint64{o.not}, r.Tried...)
	return o.inOrder.Pick(s, &q, now, rnd)
}

// Under saturating load the gate costs no throughput, whatever the traffic.
func TestGateCostsNoThroughput(t *testing.T) {
	if testing.Short() || raceOn {
		t.Skip("simulates some minutes; nothing in it is about races")
	}
	type traffic struct {
		path    string
		stream  bool
		prompt  int
		output  int
		clients int
		total   int
	}
	small := enginesim.DefaultParams()
	small.NoCache = true
	large, err := enginesim.Profile("h100-8b")
	require.NoError(t, err)
	large.NoCache = true
	for _, c := range []traffic{
		{chatPath, true, 100, 32, 96, 960},
		{chatPath, true, 100, 1, 96, 960},
		{chatPath, true, 8000, 32, 40, 160},
		{chatPath, false, 100, 32, 96, 960},
		{chatPath, false, 100, 4, 96, 960},
		{chatPath, false, 8000, 32, 40, 160},
		{"/v1/embeddings", false, 500, 0, 96, 960},
	} {
		for _, p := range []enginesim.Params{small, large} {
			run := func(noGate, counter bool) (took time.Duration) {
				synctest.Test(t, func(t *testing.T) {
					took = saturate(t, p, c.path, c.stream, c.prompt, c.output, c.clients, c.total, noGate, counter)
				})
				return took
			}
			off := run(true, true)
			for _, counter := range []bool{true, false} {
				on := run(false, counter)
				ratio := off.Seconds() / on.Seconds()
				t.Logf("%-5s %-20s stream=%-5v prompt=%-5d output=%-3d first-token counter=%-5v: %6.2f requests/s off, on %.3f of it", p.Name, c.path, c.stream, c.prompt, c.output, counter,
					float64(c.total)/off.Seconds(), ratio)
				assert.GreaterOrEqual(t, ratio, 0.97)
			}
		}
	}
}

// saturate sends total requests from so many clients through one agent and returns the virtual time that it took.
func saturate(t *testing.T, p enginesim.Params, path string, stream bool, prompt, output, clients, total int, noGate, counter bool) time.Duration {
	sim, err := enginesim.NewServer(enginesim.ServerConfig{Params: p, Model: "m", Seed: 1, Embeddings: true})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var bg sync.WaitGroup
	bg.Go(func() { _ = sim.Run(ctx) })
	f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.NoGate, c.QueueTimeout = noGate, time.Hour }, sim)
	bg.Go(func() { // the report loop reads the engine's pages
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			s := sim.Stats()
			v := EngineView{At: time.Now(), Running: routing.Some(s.Running), Waiting: routing.Some(s.Waiting),
				KVUsed: routing.Some(float64(s.KVUsed) / float64(p.KVTokens)), KVCapacity: routing.Some(p.KVTokens)}
			if counter { // as vLLM, which tells no limit
				v.FirstTokens = routing.Some(float64(s.FirstTokens))
			} else {
				v.RunLimit = routing.Some(p.Slots)
			}
			f.agents[0].SetEngine(v)
		}
	})
	start := time.Now()
	work := make(chan int, total)
	for i := range total {
		work <- i
	}
	close(work)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			hc := f.client(false)
			for i := range work {
				text := fmt.Sprintf("%06d", i) + strings.Repeat("word", prompt-2)
				body := fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":%q}]}`, stream, output, text)
				if path != chatPath {
					body = fmt.Sprintf(`{"model":"m","input":%q}`, text)
				}
				resp, err := hc.Post("http://"+f.clients[0]+path, "application/json", strings.NewReader(body))
				if assert.NoError(t, err) {
					_, err = io.Copy(io.Discard, resp.Body)
					assert.NoError(t, err)
					assert.Equal(t, 200, resp.StatusCode)
					_ = resp.Body.Close()
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	f.idle()
	cancel()
	bg.Wait()
	f.stop()
	return took
}
