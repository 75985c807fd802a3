package proxy

import (
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// serial plays prompts through an engine that works off one after another, and returns what was learned.
func serial(tokensPerSecond float64, prompts []int, together int) Load {
	var a account
	now := time.Unix(1000, 0)
	for len(prompts) > 0 {
		n := min(together, len(prompts))
		var fs []*flight
		for _, tokens := range prompts[:n] {
			f := new(flight)
			a.start(f, tokens, nil, nil, now)
			fs = append(fs, f)
		}
		for i, f := range fs {
			now = now.Add(time.Duration(float64(prompts[i]) / tokensPerSecond * float64(time.Second)))
			f.first(now)
		}
		for _, f := range fs {
			f.done(now, true)
		}
		now = now.Add(time.Second) // idle time is not the engine's
		prompts = prompts[n:]
	}
	return a.load()
}

func TestPrefillRateIsLearned(t *testing.T) {
	var long, short, mixed []int
	for i := range 60 {
		long, short = append(long, 2000), append(short, 20)
		mixed = append(mixed, 100+i*50)
	}
	for name, c := range map[string]struct {
		prompts  []int
		together int
	}{"long one by one": {long, 1}, "long in a queue": {long, 8}, "mixed in a queue": {mixed, 5}, "short": {short, 1}} {
		t.Run(name, func(t *testing.T) {
			l := serial(5000, c.prompts, c.together)
			require.True(t, l.PrefillRate.OK)
			assert.InEpsilon(t, 5000, l.PrefillRate.V, 0.05)
			assert.Equal(t, 60, l.Prefills)
			assert.Zero(t, l.Running+l.Waiting+l.PendingTokens)
			assert.EqualValues(t, 60, l.Accepted)
		})
	}
}

func TestDecodeStepIsLearned(t *testing.T) {
	var a account
	now := time.Unix(1000, 0)
	f := new(flight)
	a.start(f, 10, nil, nil, now)
	f.first(now)
	for range 100 {
		now = now.Add(25 * time.Millisecond)
		f.content(1, now)
	}
	require.True(t, a.load().DecodeStep.OK, "while the stream still runs")
	assert.InDelta(t, 25e6, float64(a.load().DecodeStep.V), 1e5)
	f.done(now, true)
	assert.EqualValues(t, 100, a.load().Tokens)
}

// Every way to end gives back what was counted, and a second end changes nothing.
func TestFlightEndsOnce(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, steps := range []string{"", "f", "p", "pf", "fp", "fc", "pc"} {
		var a account
		f := new(flight)
		a.start(f, 100, nil, nil, now)
		for _, s := range steps {
			now = now.Add(time.Second)
			switch s {
			case 'f':
				f.first(now)
			case 'p':
				f.predicted(now)
			case 'c':
				f.content(40, now)
			}
			l := a.load()
			assert.Equal(t, 1, l.Running, steps)
			assert.Zero(t, l.PendingTokens, steps)
		}
		f.done(now, true)
		f.done(now, true)
		l := a.load()
		assert.Zero(t, l.Running+l.Waiting+l.PendingTokens, steps)
	}
}

// What a replica has is known at each moment: waiting, then running, then nothing.
func TestLoadFollowsTheRequest(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			eventHead(w)
			time.Sleep(time.Second)
			say(w, chunk("a"))
			time.Sleep(time.Second)
			say(w, finishChunk+doneChunk)
		})
		f := newFleet(t, order, nil, pair(target, e)...)
		done := make(chan error, 1)
		go func() {
			_, _, err := f.get(chatBody(true))
			done <- err
		}()
		at := func() string {
			l := f.agents[target].Load()
			p := f.agents[0].cfg.Table.Peer(order[0])
			return fmt.Sprint(l.Waiting, l.Running, l.PendingTokens > 0, p.Inflight(), p.InflightTokens() > 0)
		}
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		assert.Equal(t, "1 0 true 1 true", at())
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, "0 1 false 1 false", at())
		require.NoError(t, <-done)
		synctest.Wait()
		assert.Equal(t, "0 0 false 0 false", at())
		f.idle()
	})
}

// A request that is not streamed shows no first token: its prompt leaves the pending count when it should be done.
func TestUnstreamedPromptLeavesByPrediction(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			time.Sleep(10 * time.Second)
			_, _ = w.Write([]byte(okAnswer))
		})
		f := newFleet(t, order, nil, pair(target, e)...)
		go func() { _, _, _ = f.get(chatBody(false)) }()
		time.Sleep(time.Second) // some tokens at 2,000 a second
		synctest.Wait()
		l := f.agents[target].Load()
		assert.Equal(t, 1, l.Running)
		assert.Zero(t, l.PendingTokens)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		l = f.agents[target].Load()
		assert.False(t, l.PrefillRate.OK || l.TTFT.OK, "nothing is learned from it")
		f.idle()
	})
}

// An engine that batches answers many prompts at once: what one of them shows is a small part of its speed.
func TestBlindAnswersTogetherShowTheRate(t *testing.T) {
	var a account
	now := time.Unix(1000, 0)
	for range 40 {
		var fs []*flight
		for range 64 {
			f := new(flight)
			a.start(f, 500, nil, nil, now)
			fs = append(fs, f)
		}
		now = now.Add(10 * time.Millisecond)
		for _, f := range fs {
			f.done(now, true)
		}
	}
	rate, _ := a.speed()
	assert.InEpsilon(t, 64*500/0.010, rate, 0.15)
}

func TestAnswerThatDidNotComeWholeShowsNothing(t *testing.T) {
	var a account
	now := time.Unix(1000, 0)
	for range 40 {
		f := new(flight)
		a.start(f, 100_000, nil, nil, now)
		now = now.Add(time.Millisecond)
		f.done(now, false) // refused, or the client went away
	}
	rate, _ := a.speed()
	assert.EqualValues(t, defaultPrefillRate, rate)
}

// Engines put several tokens into one event; where an answer tells how many it had, the step is still that of a token.
func TestStepOfEventsWithManyTokens(t *testing.T) {
	var a account
	now := time.Now()
	for range 100 {
		var f flight
		a.start(&f, 100, nil, nil, now)
		f.first(now.Add(20 * time.Millisecond))
		at := now.Add(20 * time.Millisecond)
		for range 4 {
			at = at.Add(640 * time.Millisecond)
			f.content(1, at)
		}
		f.told(128, 4)
		f.done(at, true)
		now = at
	}
	assert.InDelta(t, 0.020, a.load().DecodeStep.V.Seconds(), 0.001)
}

// A rate that was counted in wrong tokens is none: the next prompt tells it whole.
func TestForgetRate(t *testing.T) {
	var a account
	now := time.Now()
	prompt := func(tokens int) {
		var f flight
		a.start(&f, tokens, nil, nil, now)
		now = now.Add(300 * time.Millisecond)
		f.first(now)
		f.done(now, true)
	}
	for range 200 {
		prompt(600)
	}
	assert.InDelta(t, 2000, a.load().PrefillRate.V, 1)
	a.forgetRate()
	assert.False(t, a.load().PrefillRate.OK)
	prompt(9000)
	assert.InDelta(t, 30_000, a.load().PrefillRate.V, 1)
}

// The prompts that are at the engine when tokens turn out to be others teach nothing, nor does the time that they take.
func TestOldTokensTeachNothing(t *testing.T) {
	var a account
	now := time.Now()
	var flights [90]flight
	for i := range flights {
		a.start(&flights[i], 500, nil, nil, now)
	}
	first := func(f *flight) {
		now = now.Add(320 * time.Millisecond) // 8,000 real tokens, 25,000 a second
		f.first(now)
		assert.InDelta(t, 25_000, a.load().PrefillRate.Or(25_000), 1)
	}
	for i := range 3 {
		now = now.Add(320 * time.Millisecond)
		flights[i].first(now)
	}
	a.forgetRate()
	for i := 3; i < 80; i++ {
		first(&flights[i])
	}
	var f, g flight
	a.start(&f, 8000, nil, nil, now)
	for i := 80; i < 89; i++ {
		first(&flights[i])
	}
	flights[89].done(now, false) // given up
	first(&f)
	assert.False(t, a.load().PrefillRate.OK && a.load().PrefillRate.V < 24_000)
	a.start(&g, 8000, nil, nil, now)
	first(&g)
	assert.True(t, a.load().PrefillRate.OK)
	assert.Zero(t, a.old)
	assert.Zero(t, a.pending)
}
