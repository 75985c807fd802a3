package gossip_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/routing"
)

var (
	long   = flag.Bool("long", false, "also run what takes longer than some seconds: clusters of 100 agents and more")
	update = flag.Bool("update", false, "write the measured figures to testdata")
)

func TestMain(m *testing.M) {
	flag.Parse()
	gossiptest.Update = update
	os.Exit(m.Run())
}

// longOnly skips what takes longer than some seconds, and needs no race detector since a smaller one runs with it.
func longOnly(t *testing.T) {
	t.Helper()
	if !*long || raceEnabled {
		t.Skip("runs with -long")
	}
}

// Beyond 128 peers each agent is heard directly by 64; the background queue brings the rest, old values never.
func TestCrowd(t *testing.T) {
	longOnly(t)
	crowd(t, 131, "lan", 3*time.Second, 5*time.Second)
}

func TestCrowdLong(t *testing.T) {
	longOnly(t)
	crowd(t, 300, "large", 60*time.Second, 5*time.Second)
}

func crowd(t *testing.T, n int, profile string, window, oldest time.Duration) {
	wall := time.Now()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.cfg.Profile = profile
		for len(c.agents) < n {
			c.add(fmt.Sprintf("n%d", len(c.agents)))
			time.Sleep(25 * time.Millisecond)
		}
		took := c.until(30*time.Second, "all members", func() bool {
			for _, a := range c.agents {
				if a.peers() != n-1 {
					return false
				}
			}
			return true
		})
		t.Logf("%d agents know each other %v after the last start", n, took)
		time.Sleep(3 * time.Second)
		window += 3 * time.Second // without the first 3 s

		before := c.net.Traffic()
		for _, a := range c.agents {
			a.mu.Lock()
			a.offBy = 0
			clear(a.count)
			a.mu.Unlock()
		}
		type pair struct {
			a    *agent
			boot uint64
		}
		ages := map[pair][]time.Duration{}
		began := time.Now()
		for turn := 0; time.Since(began) < window; turn++ {
			for i, a := range c.agents {
				r := load(i)
				r.PendingTokens = routing.Some(turn % 2 * 100_000)
				a.Offer(r)
			}
			wait := time.Duration(rand.Int64N(int64(250 * time.Millisecond)))
			time.Sleep(wait)
			for _, a := range c.agents {
				if turn < 12 { // until then some records are of offers long ago
					break
				}
				a.mu.Lock()
				for boot, at := range a.heardAt {
					ages[pair{a, boot}] = append(ages[pair{a, boot}], time.Since(at)+a.reports[boot].Age)
				}
				a.mu.Unlock()
			}
			time.Sleep(250*time.Millisecond - wait)
		}
		after := c.net.Traffic()
		var direct, background []time.Duration
		pairs := 0
		for p, ds := range ages {
			if p.a.count[p.boot] >= int(2*window.Seconds()) { // the queue brings less than one a second
				direct = append(direct, ds...)
				pairs++
			} else {
				background = append(background, ds...)
			}
		}
		assert.Equal(t, 64*n, pairs, "each hears 64")
		q := func(d []time.Duration, p float64) time.Duration {
			if len(d) == 0 {
				return 0
			}
			slices.Sort(d)
			return d[int(p*float64(len(d)-1))].Round(time.Millisecond)
		}
		s := c.agents[0].Stats()
		secs := window.Seconds() * float64(n)
		gossiptest.Figure(t, 23, "%d agents, direct: %d peers, %.2f records/s, age p50 %v p99 %v; background: age p50 %v p99 %v max %v", n, s.Direct, s.Rate,
			q(direct, .5), q(direct, .99), q(background, .5), q(background, .99), q(background, 1))
		t.Logf("%.0f packets/s and %.0f bytes/s (28 a packet for headers) an agent; largest %d", float64(after.Packets-before.Packets)/secs,
			float64(after.Bytes-before.Bytes+28*(after.Packets-before.Packets))/secs, after.Largest)
		for _, a := range c.agents {
			assert.Equal(t, 64, a.Stats().Direct)
			assert.Empty(t, a.Silent())
			assert.Len(t, a.reports, n-1, "a record of everybody")
		}
		assert.Zero(t, c.saw("failed"))
		assert.LessOrEqual(t, q(direct, .99), 600*time.Millisecond)
		assert.LessOrEqual(t, q(background, .99), oldest)
		assert.LessOrEqual(t, after.Largest, 1245)

		// A drain is known to all soon, also to those who do not hear the agent directly.
		r := load(1)
		r.Flags = routing.FlagDraining
		<-c.agents[5].PublishNow(r, 3)
		took = c.until(10*time.Second, "drain known to all", func() bool {
			for _, a := range c.agents {
				if a != c.agents[5] && a.report(c.agents[5].boot).Flags != routing.FlagDraining {
					return false
				}
			}
			return true
		})
		t.Logf("a flag was known to all %v after its last direct sending", took)

		// So is a goodbye, to nearly all: the queue reaches 98 of 100. Without it memberlist's word of the leave, if it comes
		// before Serf's, is taken for a failure.
		leaver := c.agents[5]
		c.agents = slices.Delete(c.agents, 5, 6)
		leaver.stop()
		took = c.until(3*time.Second, "goodbye known", func() bool {
			knowing := 0
			for _, a := range c.agents {
				if a.report(leaver.boot).Goodbye {
					knowing++
				}
			}
			return knowing >= n*95/100
		})
		c.until(30*time.Second, "out of all lists", func() bool {
			return !slices.ContainsFunc(c.agents, func(a *agent) bool { return a.knows(leaver.boot) })
		})
		t.Logf("a goodbye was known to 95 of 100 after %v, and a failure to %d", took, c.saw("failed n5."))
		assert.LessOrEqual(t, c.saw("failed n5."), n*5/100)
		<-leaver.ended
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		t.Logf("heap %d KiB an agent", m.HeapAlloc/uint64(n)>>10)
	})
	t.Logf("wall time %v", time.Since(wall))
}
