package proxy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

func classHold(class uint8, tenant uint64, tokens int) *hold {
	h := newHold(tokens)
	h.req.Class, h.tenant, h.req.MaxTokens = class, tenant, 1
	return h
}

// turns takes n from the queue and says whose they are.
func turns(q *holdQueue, n int, who func(*hold) string) map[string]int {
	got := map[string]int{}
	for range n {
		h := q.head()
		q.take(h)
		got[who(h)]++
	}
	return got
}

func byClass(h *hold) string  { return fmt.Sprint("class ", h.req.Class) }
func byTenant(h *hold) string { return fmt.Sprint("tenant ", h.tenant) }

func TestQueueClasses(t *testing.T) {
	var q holdQueue
	for i := range 400 {
		for _, c := range []uint8{4, 3, 2, 1} { // the highest comes last
			q.push(classHold(c, 0, 99+i%2))
		}
	}
	// A tenth for what is below, at each class.
	got := turns(&q, 400, byClass)
	assert.InDelta(t, 360, got["class 1"], 2, "%v", got)
	assert.InDelta(t, 36, got["class 2"], 2, "%v", got)
	assert.InDelta(t, 4, got["class 3"], 2, "%v", got)
	assert.Equal(t, 400, turns(&q, 1200, byClass)["class 4"], "all of it in the end")
	assert.Nil(t, q.head())
	assert.Zero(t, q.len()+q.tokens())
}

// One tenant sends ten times as much, and ten times as long prompts as another: both get the same tokens. A third, who comes
// late, starts level and not with what it has not used.
func TestQueueTenants(t *testing.T) {
	var q holdQueue
	for range 300 {
		q.push(classHold(2, 1, 999))
	}
	for range 300 {
		q.push(classHold(2, 2, 99))
	}
	got := turns(&q, 110, byTenant)
	assert.InDelta(t, 10, got["tenant 1"], 1, "%v", got)
	assert.InDelta(t, 100, got["tenant 2"], 1, "%v", got)
	for range 50 {
		q.push(classHold(2, 3, 99))
	}
	got = turns(&q, 42, byTenant)
	assert.InDelta(t, 20, got["tenant 3"], 1, "%v", got)
	assert.InDelta(t, 20, got["tenant 2"], 1, "%v", got)
	assert.InDelta(t, 2, got["tenant 1"], 1, "%v", got)
}

// Who sends one request after the other does not get more than who has them all waiting.
func TestQueueOneAfterTheOther(t *testing.T) {
	var q holdQueue
	for range 100 {
		q.push(classHold(2, 1, 99))
	}
	got := map[string]int{}
	q.push(classHold(2, 2, 899))
	for range 50 {
		h := q.head()
		q.take(h)
		if got[byTenant(h)]++; h.tenant == 2 {
			q.push(classHold(2, 2, 899))
		}
	}
	assert.InDelta(t, 5, got["tenant 2"], 1, "%v", got)
}

// A twin in the plainest words: whatever is pushed, taken and removed, counts are right and nobody is lost.
func TestQueueCounts(t *testing.T) {
	var q holdQueue
	rnd := rand.New(rand.NewPCG(7, 1))
	in := map[*hold]bool{}
	for i := range 20_000 {
		switch x := rnd.IntN(3); {
		case x == 0 || len(in) == 0:
			h := classHold(uint8(1+rnd.IntN(4)), rnd.Uint64N(5), rnd.IntN(1000))
			q.push(h)
			in[h] = true
		case x == 1:
			h := q.head()
			require.True(t, in[h], "turn %d", i)
			q.take(h)
			delete(in, h)
		default:
			for h := range in {
				require.True(t, q.remove(h))
				require.False(t, q.remove(h))
				delete(in, h)
				break
			}
		}
		tokens, n := 0, 0
		for h := range in {
			tokens += h.tokens
		}
		for c := range q.lines {
			n += q.lines[c].n
			for _, t := range q.lines[c].tenants {
				n -= t.n
			}
		}
		require.Equal(t, len(in), q.len())
		require.Equal(t, tokens, q.tokens())
		require.Zero(t, n)
	}
}

// sureGate is a gate that has measured its engine, with one request at it that never ends.
func sureGate(t *testing.T, limit int) *gate {
	g := newTestGate()
	g.limit, g.timeout, g.account.prefills = limit, 30*time.Second, surePrefills
	g.view = EngineView{RunLimit: routing.Some(1)}
	p, e := g.arrive(newHold(100), 0, time.Now())
	require.Nil(t, e)
	require.NotNil(t, p)
	return g
}

// A full queue makes room for a higher class, and for a tenant that has less of it; the one that goes is told at once.
func TestFullQueueMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := sureGate(t, 8)
		defer g.close()
		put := func(class uint8, tenant uint64) (*hold, *apiError) {
			h := classHold(class, tenant, 10)
			_, e := g.arrive(h, 0, time.Now())
			return h, e
		}
		var batch []*hold
		for range 6 {
			h, e := put(4, 1)
			require.Nil(t, e)
			batch = append(batch, h)
		}
		_, e := put(4, 1)
		require.Equal(t, errQueueFull.Reason, e.Reason, "three quarters are the most for one tenant")
		for range 2 {
			_, e := put(4, 2)
			require.Nil(t, e)
		}
		assert.Equal(t, routing.ClassBatch, g.lowest(time.Now()), "a third tenant would be let in")
		_, e = put(4, 3)
		require.Nil(t, e)
		assert.Equal(t, leftShed, (<-batch[5].ready).how, "the youngest of who has most")
		_, e = put(1, 1)
		require.Nil(t, e)
		n, _ := g.load()
		assert.Equal(t, 8, n)
		for range 7 {
			_, e = put(2, 0)
			require.Nil(t, e, "nobody is known of it, so it may fill the queue")
		}
		_, e = put(2, 0)
		require.NotNil(t, e)
		assert.Equal(t, 429, e.Status)
		assert.Equal(t, routing.ClassPriority, g.lowest(time.Now()))
		assert.Equal(t, uint64(9+2), g.metrics.full.Load())
		g.drain()
	})
}

// Who would wait longer than its class or its deadline allows is told so on arrival, but not before the engine was measured
// often enough. The record says from when on.
func TestLongWaitIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := sureGate(t, 1000)
		defer g.close()
		put := func(class uint8, tokens int, deadline time.Duration) *apiError {
			h := classHold(class, 0, tokens)
			if deadline > 0 {
				h.req.Deadline = time.Now().Add(deadline)
			}
			_, e := g.arrive(h, 0, time.Now())
			return e
		}
		require.Nil(t, put(1, 90_000, 0)) // 9 s at 10,000 tokens/s
		require.Nil(t, put(1, 20_000, 0), "9 s are less than 10 s")
		require.Nil(t, put(1, 10, 0), "nobody has waited for long, so a burst may have misled the prediction")
		time.Sleep(sureWait)
		e := put(1, 10, 0)
		require.NotNil(t, e)
		assert.Equal(t, errLongWait.Reason, e.Reason)
		assert.InDelta(t, 11, e.RetryAfter.Seconds(), 0.1)
		require.Nil(t, put(2, 150_000, 0))
		require.NotNil(t, put(2, 10, 20*time.Second), "26 s are longer than it has")
		require.Nil(t, put(2, 50_000, 0))
		require.NotNil(t, put(2, 10, 0))
		require.Nil(t, put(3, 10, 0), "batch work has time")
		g.account.prefills = 3
		require.Nil(t, put(2, 10, 0), "nothing sure is known")
		assert.Equal(t, routing.ClassBatch, g.lowest(time.Now()))
		g.account.prefills = surePrefills
		assert.Equal(t, routing.ClassBatch, g.lowest(time.Now()), "batch work has time, so the record says nothing")
		assert.False(t, g.takes(&routing.Request{Class: 2}, time.Now()), "but who asks hears it")
		g.drain()
		assert.True(t, g.takes(&routing.Request{Class: 2}, time.Now()))
		assert.Equal(t, routing.ClassBatch, g.lowest(time.Now()))
	})
}

// Where slots are short and not prefill, the pace at which requests leave the queue tells how long a wait will be.
func TestWaitByTheTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		g.limit, g.timeout, g.account.prefills = 1000, 30*time.Second, surePrefills
		defer g.close()
		g.view = EngineView{RunLimit: routing.Some(2)}
		var held []*hold
		var at []*pass
		for range 200 {
			h := newHold(10)
			p, e := g.arrive(h, 0, time.Now())
			require.Nil(t, e)
			if p == nil {
				held = append(held, h)
			} else {
				at = append(at, p)
			}
		}
		for _, h := range held[:120] { // one each half second
			time.Sleep(500 * time.Millisecond)
			at[0].done(time.Now())
			at = at[1:]
			for len(h.ready) == 0 {
				time.Sleep(gateTurn)
			}
			at = append(at, (<-h.ready).pass)
		}
		n, _ := g.load()
		_, e := g.arrive(newHold(10), 0, time.Now())
		require.NotNil(t, e, "%d wait", n)
		assert.InDelta(t, float64(n)*0.5, e.RetryAfter.Seconds(), 3)
		assert.False(t, g.takes(&routing.Request{}, time.Now()))
		g.drain()
	})
}

// vLLM tells nowhere how many it runs at once: from its waiting ones the gate learns it, and from their absence that it may
// be more.
func TestGateLearnsTheRunLimit(t *testing.T) {
	g := newTestGate()
	see := func(running, waiting int) routing.Opt[int] {
		g.see(EngineView{At: time.Now(), Running: routing.Some(running), Waiting: routing.Some(waiting)}, time.Now())
		return g.state(1000).RunLimit
	}
	none := routing.Opt[int]{}
	assert.Equal(t, none, see(3, 1), "it came just now")
	assert.Equal(t, none, see(4, 1), "more run than before: so the other one did begin")
	assert.Equal(t, none, see(9, 0))
	assert.Equal(t, none, see(16, 5))
	assert.Equal(t, routing.Some(17), see(16, 20), "and one to wait there")
	assert.Equal(t, routing.Some(16), see(15, 18), "longer texts take more of its memory")
	assert.Equal(t, routing.Some(16), see(9, 0), "fewer run because fewer came")
	assert.Equal(t, routing.Some(20), see(16, 0), "more than it seemed")
	g.see(EngineView{At: time.Now(), RunLimit: routing.Some(7)}, time.Now())
	assert.Equal(t, routing.Some(7), g.state(1000).RunLimit, "it says so itself")
}

// An engine with four slots and a queue without end that gets three times what it can do: but for a few, all wait at the agent.
func TestEngineWithoutLimitIsProtected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		params := enginesim.DefaultParams()
		params.Slots = 4
		sim, err := enginesim.NewServer(enginesim.ServerConfig{Params: params, Model: "m", Seed: 1})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var bg, all sync.WaitGroup
		bg.Go(func() { _ = sim.Run(ctx) })
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.QueueTimeout = time.Hour }, sim)
		var most int
		settled := time.Now().Add(2 * time.Second)
		bg.Go(func() {
			for ctx.Err() == nil {
				time.Sleep(200 * time.Millisecond)
				s := sim.Stats()
				f.agents[0].SetEngine(EngineView{At: time.Now(), Running: routing.Some(s.Running), Waiting: routing.Some(s.Waiting), FirstTokens: routing.Some(float64(s.FirstTokens))})
				if time.Now().After(settled) {
					most = max(most, s.Waiting)
				}
			}
		})
		start := time.Now()
		for i := range 400 {
			time.Sleep(20 * time.Millisecond)
			all.Go(func() {
				resp, _, err := f.get(fmt.Sprintf(`{"model":"m","stream":true,"max_tokens":25,"ignore_eos":true,"messages":[{"role":"user","content":"request %d"}]}`, i))
				if assert.NoError(t, err) {
					assert.Equal(t, 200, resp.StatusCode)
				}
			})
		}
		all.Wait()
		took := time.Since(start)
		cancel()
		bg.Wait()
		t.Logf("%.1f requests/s; at most %d in the engine's queue", 400/took.Seconds(), most)
		assert.LessOrEqual(t, most, 5, "half a second's worth and one")
		f.idle()
	})
}
