package proxy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
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

// One engine gets twice what it can do of the default class, and two requests a second of the highest: those wait hardly
// longer than on an idle engine, and the engine does nearly all that it does where none is above the others.
func TestReserveInAnOverload(t *testing.T) {
	if testing.Short() || raceOn {
		t.Skip("simulates minutes; nothing in it is about races")
	}
	const slots = 64
	var with, without overload
	synctest.Test(t, func(t *testing.T) { with.run(t, slots, "priority") })
	synctest.Test(t, func(t *testing.T) { without.run(t, slots, "default") })
	goodput := float64(with.tokens) / float64(without.tokens)
	quiet, busy, among := p99(with.quiet), p99(with.busy), p99(without.busy)
	t.Logf("%.3f of the goodput; p99 TTFT of the highest class %v of %d unloaded, %v of %d in the overload; were it of the default class, %v", goodput,
		quiet, len(with.quiet), busy, len(with.busy), among)
	assert.GreaterOrEqual(t, goodput, 0.95)
	assert.LessOrEqual(t, busy, 2*quiet+20*time.Millisecond, "and a step, since it is the worst of fifty")
	assert.Greater(t, among, 4*quiet)
}

func p99(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)*99/100]
}

// overload is what an agent's engine did in an overload, and what a few requests saw that came all the time.
type overload struct {
	tokens      int             // answered in the overload
	quiet, busy []time.Duration // times to the first token of the few, before the overload and in it
}

// run lets the few be of that class.
func (o *overload) run(t *testing.T, slots int, class string) {
	const (
		calm  = 15 * time.Second // since start
		from  = 20 * time.Second
		until = 45 * time.Second
	)
	params := enginesim.Rates(20_000, 20*time.Millisecond, slots)
	sim, err := enginesim.NewServer(enginesim.ServerConfig{Params: params, Model: "m", Seed: 1})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var bg, all sync.WaitGroup
	bg.Go(func() { _ = sim.Run(ctx) })
	f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.TrustPriority, c.QueueLimit = true, 64 }, sim)
	bg.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(200 * time.Millisecond)
			s := sim.Stats()
			f.agents[0].SetEngine(EngineView{At: time.Now(), Running: routing.Some(s.Running), Waiting: routing.Some(s.Waiting),
				RunLimit: routing.Some(slots), FirstTokens: routing.Some(float64(s.FirstTokens))})
		}
	})
	start := time.Now()
	inside := func() bool { d := time.Since(start); return d > from && d < until }
	var mu sync.Mutex
	send := func(class, prompt string, most int, ttft *[]time.Duration) {
		at := time.Now()
		resp, err := f.post(ctx, fmt.Sprintf(`{"model":"m","stream":true,"max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":"%s%s"}]}`, most, prompt,
			strings.Repeat(" and so on", 80)), "x-grapevine-priority", class)
		if !assert.NoError(t, err) {
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != 200 {
			assert.NotEqual(t, "priority", class)
			return
		}
		var piece [4096]byte
		for read := 0; err == nil; {
			var n int
			n, err = resp.Body.Read(piece[:])
			if read += n; ttft != nil && read > 200 { // the first chunk has the role alone
				mu.Lock()
				*ttft = append(*ttft, time.Since(at))
				mu.Unlock()
				ttft = nil
			}
		}
	}
	all.Go(func() {
		rnd := rand.New(rand.NewPCG(1, 1))
		for n := 0; time.Since(start) < until; n++ {
			time.Sleep(time.Duration(rnd.ExpFloat64() * float64(500*time.Millisecond)))
			var list *[]time.Duration
			if time.Since(start) < calm {
				list = &o.quiet
			} else if inside() {
				list = &o.busy
			}
			all.Go(func() { send(class, fmt.Sprint("few ", n), 10, list) })
		}
	})
	all.Go(func() {
		time.Sleep(calm)
		capacity := float64(slots) / (50 * params.Cost.Weights) // requests/s
		rnd := rand.New(rand.NewPCG(2, 2))
		for n := 0; time.Since(start) < until; n++ {
			time.Sleep(time.Duration(rnd.ExpFloat64() / (2 * capacity) * float64(time.Second)))
			most := 10 + rnd.IntN(81)
			all.Go(func() { send("default", fmt.Sprint("many ", n), most, nil) })
		}
	})
	time.Sleep(from)
	before := sim.Stats().Generated
	time.Sleep(until - from)
	o.tokens = int(sim.Stats().Generated - before)
	all.Wait()
	cancel()
	bg.Wait()
	f.idle()
	f.stop()
}

// Slots are kept free only while a higher class comes, those for whom they are kept pass those who wait, and the lower ones keep
// their tenth.
func TestReserveOfTheGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		defer g.close()
		g.limit = 100
		g.view = EngineView{RunLimit: routing.Some(8)}
		arrive := func(class uint8) (*hold, *pass) {
			h := newHold(1)
			h.req.Class = class
			p, e := g.arrive(h, 0, time.Now())
			require.Nil(t, e)
			return h, p
		}
		_, high := arrive(routing.ClassPriority)
		require.NotNil(t, high)
		var inside []*pass
		for range 6 {
			_, p := arrive(routing.ClassDefault)
			require.NotNil(t, p)
			inside = append(inside, p)
		}
		first, p := arrive(routing.ClassDefault)
		require.Nil(t, p, "the last slot is kept free")
		time.Sleep(2 * routing.GatePatience)
		assert.Empty(t, first.ready, "for the patient too")
		_, second := arrive(routing.ClassPriority)
		require.NotNil(t, second, "and this is whom it is for")
		third, p := arrive(routing.ClassPriority)
		require.Nil(t, p)
		inside[0].done(time.Now())
		require.Len(t, third.ready, 1, "the higher class goes first")
		third.ready <- <-third.ready
		assert.Empty(t, first.ready)
		high.done(time.Now())
		assert.Empty(t, first.ready)
		second.done(time.Now())
		require.Len(t, first.ready, 1)
		waits, p := arrive(routing.ClassDefault)
		require.Nil(t, p)
		time.Sleep(6 * time.Second)
		assert.Len(t, waits.ready, 1, "nobody of a higher class came for five seconds")

		g = newTestGate()
		defer g.close()
		g.view = EngineView{RunLimit: routing.Some(8)}
		for range 7 {
			arrive(routing.ClassPriority)
		}
		_, p = arrive(routing.ClassDefault)
		assert.NotNil(t, p, "nothing of the class is there")
	})
}
