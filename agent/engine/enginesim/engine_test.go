package enginesim

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// drain advances e by its own events until nothing is left to happen.
func drain(e *Engine) (all []Event) {
	for at, ok := e.NextEvent(); ok; at, ok = e.NextEvent() {
		all = append(all, e.Advance(at)...)
	}
	return all
}

func find(t *testing.T, all []Event, job uint64, kind EventKind) Event {
	t.Helper()
	for _, ev := range all {
		if ev.Job == job && ev.Kind == kind {
			return ev
		}
	}
	require.Failf(t, "missing event", "job %d: no %v", job, kind)
	return Event{}
}

func submit(t *testing.T, e *Engine, at time.Duration, j Job) Handle {
	t.Helper()
	h, err := e.Submit(at, j)
	require.NoError(t, err)
	return h
}

func blocks(ids ...uint64) []uint64 { return ids }

// empty asserts that nothing is held after the last job has left.
func empty(t *testing.T, e *Engine) {
	t.Helper()
	l := e.Load()
	assert.Zero(t, l.Running, "running")
	assert.Zero(t, l.Waiting, "waiting")
	assert.Zero(t, l.Pending, "pending")
	assert.Zero(t, l.Preempted, "preempted")
	assert.Zero(t, l.KVUsed, "KV in use")
	assert.Zero(t, e.context, "context")
	assert.Zero(t, e.streams, "streams")
	assert.Empty(t, e.prefill)
	assert.Empty(t, e.decode)
	idle := 0
	for _, i := range e.cache.index {
		assert.Zero(t, e.cache.nodes[i].refs, "references to a block")
		idle += int(e.cache.nodes[i].tokens)
	}
	assert.Equal(t, idle, e.cache.idle, "idle tokens")
	assert.LessOrEqual(t, e.cache.idle, e.p.KVTokens)
	c := e.Counters()
	assert.Equal(t, c.Submitted, c.Done+c.Aborted+c.Lost, "every job ends once")
}

func TestAloneFollowsTheFormula(t *testing.T) {
	p, err := Profile("h100-8b")
	require.NoError(t, err)
	e := New(p)
	submit(t, e, time.Second, Job{ID: 1, Prompt: 1000, Output: 101})
	all := drain(e)
	c := p.Cost
	prefill := c.Fixed + c.Token*1000 + c.Attention*1000*500
	assert.InDelta(t, prefill, (find(t, all, 1, First).At - time.Second).Seconds(), 1e-8)
	decode := 0.0
	for i := range 100 {
		decode += c.Fixed + c.Weights + c.KV*float64(1000+i) + c.Sequence
	}
	assert.InDelta(t, prefill+decode, (find(t, all, 1, Done).At - time.Second).Seconds(), 1e-6)
	assert.Equal(t, 101, find(t, all, 1, Done).Tokens)
	empty(t, e)
}

func TestRatesAreWhatTheySay(t *testing.T) {
	e := New(Rates(10_000, 20*time.Millisecond, 4))
	submit(t, e, 0, Job{ID: 1, Prompt: 5000, Output: 11})
	all := drain(e)
	assert.Equal(t, 500*time.Millisecond, find(t, all, 1, First).At, "5,000 tokens at 10,000/s")
	assert.Equal(t, 200*time.Millisecond, find(t, all, 1, Done).At-find(t, all, 1, First).At)
}

func TestBatchSharesSteps(t *testing.T) {
	e := New(Rates(10_000, 20*time.Millisecond, 4))
	for id := range uint64(4) {
		submit(t, e, 0, Job{ID: id, Prompt: 10, Output: 50})
	}
	all := drain(e)
	for id := range uint64(4) {
		assert.Equal(t, time.Second, find(t, all, id, Done).At, "four together take as long as one")
	}
}

func TestTheFifthWaitsForASlot(t *testing.T) {
	e := New(Rates(10_000, 20*time.Millisecond, 4))
	for id := range uint64(5) {
		submit(t, e, 0, Job{ID: id, Prompt: 10, Output: 50})
	}
	e.Advance(500 * time.Millisecond)
	l := e.Load()
	assert.Equal(t, 4, l.Running)
	assert.Equal(t, 1, l.Waiting)
	assert.Equal(t, 10, l.Pending)
	assert.Equal(t, 4*(10+24), l.KVUsed, "prompt and the tokens but the newest")
	all := drain(e)
	assert.Equal(t, time.Second, find(t, all, 4, Started).At)
	empty(t, e)
}

func TestALongPromptIsCutIntoChunksAndDecodesGoFirst(t *testing.T) {
	p := Rates(10_000, 20*time.Millisecond, 4)
	p.Budget = 1000
	e := New(p)
	submit(t, e, 0, Job{ID: 1, Prompt: 10, Output: 100, Stream: true})
	submit(t, e, 100*time.Millisecond, Job{ID: 2, Prompt: 2997, Output: 1})
	all := drain(e)
	assert.Equal(t, 400*time.Millisecond, find(t, all, 2, First).At, "three steps of 100 ms, 999 tokens each beside a decode")
	n := 0
	for _, ev := range all {
		if ev.Job == 1 && ev.Kind == Token && ev.At > 100*time.Millisecond && ev.At <= 400*time.Millisecond {
			n++
		}
	}
	assert.Equal(t, 3, n, "the stream beside it goes on, slower")
}

func TestPrefixIsComputedOnce(t *testing.T) {
	e := New(DefaultParams())
	submit(t, e, 0, Job{ID: 1, Prompt: 2048, Output: 2, Blocks: blocks(1, 2, 3, 4)})
	submit(t, e, 5*time.Second, Job{ID: 2, Prompt: 2048, Output: 2, Blocks: blocks(1, 2, 3, 4)})
	submit(t, e, 9*time.Second, Job{ID: 3, Prompt: 2048, Output: 2, Blocks: blocks(1, 2, 30, 40)})
	all := drain(e)
	assert.Equal(t, 0, find(t, all, 1, Started).Cached)
	assert.Equal(t, 2047, find(t, all, 2, Started).Cached, "all but the last token")
	assert.Equal(t, 1024, find(t, all, 3, Started).Cached)
	empty(t, e)
}

func TestLeastRecentlyUsedPrefixGoesFirst(t *testing.T) {
	p := DefaultParams()
	p.KVTokens = 2100
	e := New(p)
	for i, first := range []uint64{10, 20, 10, 30} { // 10 is used again before 30 needs room
		submit(t, e, time.Duration(i)*time.Second, Job{ID: uint64(i), Prompt: 1024, Output: 1, Blocks: blocks(first, first+1)})
	}
	drain(e)
	assert.Equal(t, 1024, e.Match(blocks(10, 11)))
	assert.Equal(t, 0, e.Match(blocks(20, 21)))
	assert.Equal(t, 1024, e.Match(blocks(30, 31)))
}

func TestAnswersAreRemembered(t *testing.T) {
	e := New(DefaultParams())
	submit(t, e, 0, Job{ID: 1, Prompt: 512, Output: 600, Blocks: blocks(1)})
	drain(e)
	e.Remember(time.Minute, blocks(1, 2))
	assert.Equal(t, 1024, e.Match(blocks(1, 2, 3)))
	empty(t, e)
}

func TestPreemptionRecomputesAndLosesNothing(t *testing.T) {
	p := Rates(10_000, 20*time.Millisecond, 8)
	p.KVTokens = 1000
	e := New(p)
	for id := range uint64(4) {
		submit(t, e, 0, Job{ID: id, Prompt: 200, Output: 200})
	}
	all := drain(e)
	assert.NotZero(t, e.Counters().Preemptions)
	assert.Equal(t, uint64(3), find(t, all, 3, Preempted).Job, "the youngest goes first")
	for id := range uint64(4) {
		assert.Equal(t, 200, find(t, all, id, Done).Tokens)
		firsts := 0
		for _, ev := range all {
			if ev.Job == id && ev.Kind == First {
				firsts++
			}
		}
		assert.Equal(t, 1, firsts, "one first token, preempted or not")
	}
	empty(t, e)
}

func TestAbortFreesAtOnceAndSpeedsTheOthersUp(t *testing.T) {
	e := New(Rates(10_000, 20*time.Millisecond, 1))
	h := submit(t, e, 0, Job{ID: 1, Prompt: 10, Output: 1000})
	submit(t, e, 0, Job{ID: 2, Prompt: 10, Output: 1})
	w := submit(t, e, 0, Job{ID: 3, Prompt: 10, Output: 1})
	e.Advance(100 * time.Millisecond)
	assert.True(t, e.Abort(110*time.Millisecond, h))
	assert.True(t, e.Abort(110*time.Millisecond, w), "a waiting one too")
	assert.False(t, e.Abort(110*time.Millisecond, h), "once only")
	all := drain(e)
	assert.Equal(t, 120*time.Millisecond, find(t, all, 2, Started).At, "when the step under way is over")
	empty(t, e)
}

func TestPauseShiftsEverything(t *testing.T) {
	run := func(pause time.Duration) time.Duration {
		e := New(DefaultParams())
		submit(t, e, 0, Job{ID: 1, Prompt: 1000, Output: 100})
		e.Pause(333 * time.Millisecond)
		_, ok := e.NextEvent()
		for ; ok; _, ok = e.NextEvent() { // what happened before
			e.Advance(333 * time.Millisecond)
		}
		e.Advance(333*time.Millisecond + pause)
		e.Resume(333*time.Millisecond + pause)
		return find(t, drain(e), 1, Done).At
	}
	assert.Equal(t, run(0)+10*time.Second, run(10*time.Second))
}

func TestKillLosesAll(t *testing.T) {
	e := New(Rates(10_000, 20*time.Millisecond, 1))
	for id := range uint64(3) {
		submit(t, e, 0, Job{ID: id, Prompt: 10, Output: 100})
	}
	e.Kill(time.Second)
	all := drain(e)
	for id := range uint64(3) {
		find(t, all, id, Lost)
	}
	assert.Equal(t, 50, find(t, all, 0, Lost).Tokens)
	_, err := e.Submit(time.Second, Job{Prompt: 1})
	require.ErrorIs(t, err, ErrDead)
	empty(t, e)
}

func TestRefusals(t *testing.T) {
	p := DefaultParams()
	p.MaxQueued, p.Context = 1, 100
	e := New(p)
	_, err := e.Submit(0, Job{Prompt: 0, Output: 1})
	require.ErrorIs(t, err, ErrNoPrompt)
	_, err = e.Submit(0, Job{Prompt: 60, Output: 41})
	require.ErrorIs(t, err, ErrTooLong)
	submit(t, e, 0, Job{Prompt: 60, Output: 40})
	_, err = e.Submit(0, Job{Prompt: 1, Output: 1})
	require.ErrorIs(t, err, ErrBusy)
}

// randomStory plays seeded arrivals, aborts, pauses, and speed changes; stream makes every job report each token, which
// takes the engine step by step where it would otherwise skip.
func randomStory(seed uint64, stream bool) (*Engine, []Event) {
	r := rand.New(rand.NewPCG(seed, 1))
	p := Rates(5_000, 10*time.Millisecond, 1+r.IntN(12))
	p.Cost.KV, p.Cost.Attention, p.Cost.Sequence = 290e-9, 6.5e-9, 30e-6
	p.KVTokens, p.BlockTokens = 600+r.IntN(4000), 64
	p.Budget = p.Slots + 1 + r.IntN(500)
	e := New(p)
	var all []Event
	var handles []Handle
	now := time.Duration(0)
	for id := range uint64(200) {
		next := now + time.Duration(r.ExpFloat64()*float64(40*time.Millisecond))
		for {
			at, ok := e.NextEvent()
			if !ok || at > next {
				break
			}
			all = append(all, e.Advance(at)...)
		}
		now = next
		prompt := 1 + r.IntN(500)
		family := uint64(r.IntN(5))
		var hs []uint64
		for b := range (prompt + 63) / 64 {
			h := family<<32 | uint64(b)
			if 64*(b+1) > prompt || b > 3 { // the tail is the prompt's own
				h = id<<40 | uint64(b) | 1<<63
			}
			hs = append(hs, h)
		}
		h, err := e.Submit(now, Job{ID: id, Prompt: prompt, Output: r.IntN(90), Blocks: hs, Stream: stream})
		if err == nil {
			handles = append(handles, h)
		}
		switch r.IntN(10) {
		case 0:
			if len(handles) > 0 {
				e.Abort(now, handles[r.IntN(len(handles))])
			}
		case 1:
			e.SetSpeed(now, 0.5+r.Float64())
		case 2:
			e.Pause(now)
			now += time.Duration(r.IntN(50)) * time.Millisecond
			e.Resume(now)
		}
		if over := e.used + e.cache.idle; over > p.KVTokens || e.used < 0 {
			panic(fmt.Sprintf("seed %d: %d KV tokens of %d", seed, over, p.KVTokens))
		}
	}
	return e, append(all, drain(e)...)
}

func TestEveryCounterReturnsToZero(t *testing.T) {
	for seed := range uint64(300) {
		e, all := randomStory(seed, seed%2 == 0)
		empty(t, e)
		done := map[uint64]int{}
		last := time.Duration(0)
		for _, ev := range all {
			assert.GreaterOrEqual(t, ev.At, last, "time runs on")
			last = ev.At
			if ev.Kind == Done {
				done[ev.Job]++
			}
		}
		for id, n := range done {
			assert.Equal(t, 1, n, "job %d", id)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// The engine that skips over equal steps and the one that takes each step tell the same story, to the nanosecond.
func TestSkippingEqualsStepping(t *testing.T) {
	for seed := range uint64(300) {
		skip, a := randomStory(seed, false)
		step, b := randomStory(seed, true)
		var want []Event
		for _, ev := range b {
			if ev.Kind != Token {
				want = append(want, ev)
			}
		}
		for i := range min(len(a), len(want)) {
			require.Equal(t, want[i], a[i], "seed %d, event %d", seed, i)
		}
		require.Len(t, a, len(want), "seed %d", seed)
		ca, cb := skip.Counters(), step.Counters()
		ca.Busy, cb.Busy = ca.Busy.Round(time.Millisecond), cb.Busy.Round(time.Millisecond)
		require.Equal(t, cb, ca, "seed %d", seed)
	}
}
