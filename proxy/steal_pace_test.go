package proxy

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/routing"
)

// The answer to a pull brings the victim's record, which shows that it still holds something. That must not be a reason
// to ask again at once: a victim with nothing to give was asked without a pause.
func TestAPullThatGaveNothingPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		f := newFleet(t, nil, func(_ int, c *Config) {
			c.Record = func() []byte { return []byte("record") }
		}, answers(200, "{}"), answers(200, "{}"))
		withVersion(f)
		victim, thief := f.agents[0], f.agents[1]
		heard := 0
		thief.cfg.OnRecord = func(uint64, []byte) {
			if heard++; heard > 1000 {
				cancel()
				return
			}
			thief.Wake()
		}
		_, _ = victim.gate.arrive(newHold(5000), 0, time.Now())
		h := newHold(1000)
		h.fixed = true // it cannot be given
		p, _ := victim.gate.arrive(h, 0, time.Now())
		assert.Nil(t, p)
		thief.cfg.Table.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Minute,
			Held: routing.Some(1), HeldTokens: routing.Some(1000)}, time.Now())
		var bg sync.WaitGroup
		bg.Go(func() { _ = thief.Run(ctx) })
		thief.Wake()
		time.Sleep(time.Second)
		cancel()
		bg.Wait()
		assert.Greater(t, heard, 3, "it asks again")
		assert.Less(t, heard, 100)
	})
}
