package gossip_test

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/routing"
)

// A peer whose three heartbeats are missing gets no request, whatever the member list says. Twice: one that the probes still
// reach by TCP, so that it is a member for ever, and one that is killed, which the table knows before the probes do.
func TestSilentGetsNoRequest(t *testing.T) {
	for _, killed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(t)
			c.grow(10)
			c.until(10*time.Second, "complete", c.complete)
			a, victim := c.agents[0], c.agents[9]
			table := routing.NewTable(a.Self())
			for _, m := range a.Members() {
				table.SetMember(m.Member, time.Now())
			}
			a.table.Store(table)
			policy, err := routing.NewPolicy("random")
			require.NoError(t, err)
			rnd := rand.New(rand.NewPCG(1, 2))
			shares := func() (share float64) { // of 1,000 picks
				for range 1000 {
					d := policy.Pick(table.Snapshot(), &routing.Request{PromptTokens: 100}, time.Now(), rnd)
					require.NotNil(t, d.Peer)
					if d.Peer.Member().Boot == victim.boot {
						share += 0.001
					}
				}
				return share
			}
			work := func(d time.Duration) { // as agents do, all make their report anew all the time
				for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(min(50*time.Millisecond, time.Until(end))) {
					for _, x := range c.agents {
						x.Offer(load(1))
					}
				}
				synctest.Wait()
			}
			work(3 * time.Second)
			assert.InDelta(t, 0.1, shares(), 0.05, "chosen as any other")

			heartbeat := a.report(victim.boot).Heartbeat
			if killed {
				victim.kill()
				c.agents = c.agents[:9]
			} else {
				c.net.BlockUDP(victim.Addr(), true)
			}
			a.mu.Lock()
			last := a.heardAt[victim.boot]
			a.mu.Unlock()
			work(time.Until(last.Add(3*heartbeat - 100*time.Millisecond)))
			if !killed { // the probes may know by now
				assert.Positive(t, shares(), "the last heartbeat may still come")
			}
			work(110 * time.Millisecond)
			missing := time.Since(last)
			for range 50 { // 5 s
				require.Zero(t, shares(), "%v after its last record", time.Since(last))
				work(100 * time.Millisecond)
			}
			if killed {
				gossiptest.Figure(t, 8, "in memory: no request of 50,000 from %v after the last record on, with a heartbeat of %v", missing, heartbeat)
				return
			}
			assert.True(t, a.knows(victim.boot), "still a member")
			c.net.BlockUDP(victim.Addr(), false)
			work(1200 * time.Millisecond)
			assert.InDelta(t, 0.1, shares(), 0.05, "back with its next heartbeat")
		})
	}
}
