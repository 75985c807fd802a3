package gossip_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/routing"
)

// cluster is N agents on a network in memory; it lives in a synctest bubble.
type cluster struct {
	t      *testing.T
	net    *gossiptest.Network
	cfg    gossip.Config
	agents []*agent
	seeds  []string
	next   uint64
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{t: t, net: gossiptest.New(1)}
	// The last clean-up: time stands still once the test's function is over, and memberlist's goroutines end by timers.
	t.Cleanup(func() { time.Sleep(time.Minute) })
	t.Cleanup(func() { // whom a test takes out of agents it has ended
		for _, a := range c.agents {
			a.end()
		}
	})
	c.net.SetDelay(200*time.Microsecond, 2*time.Millisecond)
	c.cfg = gossip.Config{Cluster: "test"}
	return c
}

// add starts one agent; the first three are the seeds of the others.
func (c *cluster) add(name string) *agent {
	c.t.Helper()
	c.next++
	tr := c.net.Listen()
	cfg := c.cfg
	cfg.Transport = tr
	cfg.Join = c.seeds
	a := build(c.t, name, c.next<<32|1, cfg)
	a.run()
	a.Offer(load(int(c.next)))
	if len(c.seeds) < 3 {
		c.seeds = append(c.seeds[:len(c.seeds):len(c.seeds)], tr.Addr())
	}
	c.agents = append(c.agents, a)
	return a
}

func (c *cluster) grow(n int) {
	for len(c.agents) < n {
		c.add(fmt.Sprintf("n%d", len(c.agents)))
	}
}

// until advances the time in steps until ok, and returns how long it took.
func (c *cluster) until(limit time.Duration, what string, ok func() bool) time.Duration {
	c.t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > limit {
			c.t.Fatalf("%s: not within %v", what, limit)
		}
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
	}
	return time.Since(began)
}

// complete reports whether every agent knows every other and has a record of it younger than 3 heartbeats.
func (c *cluster) complete() bool { return c.completeAmong(c.agents) }

func (c *cluster) completeAmong(agents []*agent) bool {
	for _, a := range agents {
		if a.peers() != len(agents)-1 {
			return false
		}
		a.mu.Lock()
		for _, b := range agents {
			if at, ok := a.heardAt[b.boot]; a != b && (!ok || time.Since(at) > 3600*time.Millisecond) {
				a.mu.Unlock()
				return false
			}
		}
		a.mu.Unlock()
	}
	return true
}

func (c *cluster) saw(event string) int {
	n := 0
	for _, a := range c.agents {
		if a.saw(event) {
			n++
		}
	}
	return n
}

func addrs(agents []*agent) (out []string) {
	for _, a := range agents {
		out = append(out, a.Addr())
	}
	return out
}

// A real Serf cluster of 64: complete soon, quiet for a minute, one killed (usually known to all within 5 s, in rare runs
// 6.6 s) and one leaving.
func TestCluster64(t *testing.T) {
	wall := time.Now()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(64)
		took := c.until(15*time.Second, "complete", c.complete)
		t.Logf("64 agents complete after %v", took)

		before := c.net.Traffic()
		time.Sleep(time.Minute)
		after := c.net.Traffic()
		t.Logf("idle: %.0f packets/s and %.0f bytes/s an agent", float64(after.Packets-before.Packets)/60/64, float64(after.Bytes-before.Bytes)/60/64)
		assert.Zero(t, c.saw("failed"))
		assert.True(t, c.complete())
		gossiptest.Figure(t, 25, "without a key, largest packet of 64 agents %d bytes", after.Largest)
		assert.LessOrEqual(t, after.Largest, 1245)

		victim := c.agents[63]
		c.agents = c.agents[:63]
		victim.kill()
		took = c.until(10*time.Second, "kill known", func() bool { return c.saw("failed n63.") == 63 })
		t.Logf("kill known to all after %v", took)

		leaver := c.agents[62]
		c.agents = c.agents[:62]
		leaver.stop()
		took = c.until(50*time.Millisecond, "goodbye", func() bool {
			for _, a := range c.agents {
				if !a.report(leaver.boot).Goodbye {
					return false
				}
			}
			return true
		})
		goodbye := took
		took = c.until(1500*time.Second, "leave known", func() bool { return c.saw("left n62.") == 62 })
		gossiptest.Figure(t, 9, "of 64 in memory: goodbye at all after %v, leave after %v", goodbye, goodbye+took)
		assert.Zero(t, c.saw("failed n62."))
		<-leaver.ended
		assert.NoError(t, leaver.err)
		assert.True(t, c.agents[0].HasLeft(leaver.boot))
		assert.False(t, c.agents[0].HasLeft(victim.boot))
	})
	t.Logf("wall time %v", time.Since(wall))
}

func TestJoinAndKill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(10)
		c.until(10*time.Second, "complete", c.complete)
		time.Sleep(5 * time.Second)

		late := c.add("late")
		took := c.until(2*time.Second, "late joiner known with its load", func() bool { return c.complete() })
		t.Logf("late joiner complete after %v", took)
		time.Sleep(time.Second)
		for _, a := range c.agents[:10] {
			require.Equal(t, routing.Some(11), a.report(late.boot).Running)
		}

		c.agents = c.agents[:10]
		late.kill()
		took = c.until(6*time.Second, "failed", func() bool { return c.saw("failed late.") == 10 })
		gossiptest.Figure(t, 8, "of 11 in memory: kill known to all after %v", took)
		assert.True(t, c.complete())
	})
}

func TestPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(10)
		c.until(10*time.Second, "complete", c.complete)
		var all []string
		for _, cut := range []time.Duration{15 * time.Second, 40 * time.Second} {
			left, right := c.agents[:5], c.agents[5:]
			c.net.Partition(addrs(left), addrs(right))
			split := c.until(8*time.Second, "split", func() bool { return c.completeAmong(left) && c.completeAmong(right) })
			time.Sleep(cut - split)
			assert.True(t, c.completeAmong(left) && c.completeAmong(right), "each half keeps its own")
			c.net.Heal()
			took := c.until(10*time.Second, "healed", c.complete)
			all = append(all, fmt.Sprintf("cut of %v: known after %v, all fresh %v after healing", cut, split, took))
			time.Sleep(5 * time.Second)
		}
		gossiptest.Figure(t, 12, "in memory, %s", strings.Join(all, "; "))
	})
}

// A killed agent comes back at once under the same name with another address and boot id.
func TestC72RestartSameName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(10)
		c.until(10*time.Second, "complete", c.complete)
		time.Sleep(2 * time.Second)
		old := c.agents[9]
		old.kill()
		c.agents = c.agents[:9]
		again := c.add("n9")
		known := c.until(2*time.Second, "new one known", func() bool {
			for _, a := range c.agents[:9] {
				if !a.knows(again.boot) {
					return false
				}
			}
			return true
		})
		took := c.until(time.Second, "old one gone", func() bool {
			for _, a := range c.agents {
				if a.knows(old.boot) {
					return false
				}
			}
			return true
		})
		gossiptest.Figure(t, 13, "new address everywhere after %v, old entry gone %v later", known, took)
		time.Sleep(10 * time.Second)
		assert.True(t, c.complete())
		assert.Zero(t, c.saw("failed n8."))
	})
}

// Two live agents under one name, an operator's mistake: both stay, with a warning.
func TestTwoAgentsOneName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(3)
		c.add("n1")
		c.until(10*time.Second, "complete", c.complete)
		time.Sleep(10 * time.Second)
		assert.True(t, c.complete())
		assert.Zero(t, c.saw("replaced"))
		assert.Contains(t, c.agents[0].log.String(), "two agents have the same node name")
	})
}

// A whole Deployment with one name in its template: all stay, each says so once, and nobody asks everybody after everybody.
func TestManyAgentsOneName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		packets := func(name func(int) string) uint64 {
			c := newCluster(t)
			for i := range 30 {
				c.add(name(i))
				time.Sleep(50 * time.Millisecond)
			}
			c.until(15*time.Second, "complete", c.complete)
			time.Sleep(10 * time.Second)
			assert.True(t, c.complete())
			assert.Zero(t, c.saw("replaced"))
			for _, a := range c.agents {
				if same := a.log.count("same node name"); name(0) == name(1) {
					assert.Equal(t, 1, same)
				} else {
					assert.Zero(t, same)
				}
				a.kill()
			}
			return c.net.Traffic().Packets
		}
		own := packets(func(i int) string { return fmt.Sprintf("n%d", i) })
		one := packets(func(int) string { return "grapevine" })
		t.Logf("packets of 30 agents in 10 s: %d, and %d under one name", own, one)
		assert.Less(t, one, own+own/5)
	})
}

func TestLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(30)
		c.until(15*time.Second, "complete", c.complete)
		c.net.SetLoss(0.05)
		type mark struct{ sent, got uint64 }
		var before, after mark
		sum := func() (m mark) {
			for _, a := range c.agents {
				s := a.Stats()
				m.sent += s.RecordsSent
				m.got += s.RecordsHeard
			}
			return m
		}
		for _, a := range c.agents {
			a.mu.Lock()
			a.offBy = 0
			a.mu.Unlock()
		}
		before = sum()
		for i := range 120 { // 4 changes a second for 30 s
			for _, a := range c.agents {
				r := load(1)
				r.PendingTokens = routing.Some(i % 2 * 100_000)
				a.Offer(r)
			}
			time.Sleep(250 * time.Millisecond)
		}
		after = sum()
		share := float64(after.got-before.got) / float64(after.sent-before.sent)
		worst := time.Duration(0)
		for _, a := range c.agents {
			a.mu.Lock()
			worst = max(worst, a.offBy)
			a.mu.Unlock()
		}
		gossiptest.Figure(t, 5, "%d records sent, %.1f %% arrived, longest gap between two of one origin %v, no failed event", after.sent-before.sent, 100*share, worst)
		assert.GreaterOrEqual(t, share, 0.94)
		assert.Greater(t, after.sent-before.sent, uint64(30*29*30*3), "about 4 records/s each")
		assert.Less(t, worst, 3600*time.Millisecond)
		assert.Zero(t, c.saw("failed"))
	})
}

func TestWrongKeyAndCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		good, err := gossip.ParseKeys("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
		require.NoError(t, err)
		other, err := gossip.ParseKeys("/////wQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
		require.NoError(t, err)
		c.cfg.Keys = good
		c.grow(3)
		c.until(10*time.Second, "complete", c.complete)
		inside := c.agents

		c.cfg.Keys = other
		strangers := []*agent{c.add("other-key")}
		c.cfg.Keys = nil
		strangers = append(strangers, c.add("no-key"))
		c.cfg.Keys, c.cfg.Cluster = good, "green"
		strangers = append(strangers, c.add("other-cluster"))

		time.Sleep(30 * time.Second)
		assert.True(t, c.completeAmong(inside))
		for _, s := range strangers {
			assert.Equal(t, 1, s.Alive(), s.Name())
			assert.Equal(t, 3, s.log.count("join address unreachable"), "one warning a seed: %s", s.log)
			gossiptest.Figure(t, 18, "3 strangers refused by 3 agents, %d lines a stranger in 30 s, at most one a seed", s.log.count("join address unreachable"))
			assert.NotEmpty(t, s.Stats().Unreachable)
		}
		for _, a := range inside {
			assert.Equal(t, 3, a.Alive())
			assert.Less(t, a.log.count("level="), 60, "rate-limited: %s", a.log)
		}
	})
}

// A member whose UDP is blocked stays alive by TCP and is named as silent.
func TestUDPBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(3)
		c.until(10*time.Second, "complete", c.complete)
		assert.Empty(t, c.agents[0].Silent())
		c.net.BlockUDP(c.agents[2].Addr(), true)
		time.Sleep(20 * time.Second)
		silent := c.agents[0].Silent()
		require.Len(t, silent, 1)
		assert.Equal(t, c.agents[2].boot, silent[0].Boot)
		assert.Zero(t, c.saw("failed"), "no flapping")
		c.net.BlockUDP(c.agents[2].Addr(), false)
		c.until(3*time.Second, "heard again", func() bool { return len(c.agents[0].Silent()) == 0 })
	})
}

// The same from the start: the agent joins by TCP, stays a member and is silent to all, as all are to it.
func TestUDPBlockedFromTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(4)
		c.until(10*time.Second, "complete", c.complete)
		c.net.BlockUDP("10.0.0.5:7946", true)
		mute := c.add("mute")
		c.until(15*time.Second, "a member all the same", func() bool {
			for _, a := range c.agents {
				if a.Alive() != 5 {
					return false
				}
			}
			return true
		})
		time.Sleep(time.Minute)
		for _, a := range c.agents[:4] {
			require.Len(t, a.Silent(), 1)
			assert.Equal(t, mute.boot, a.Silent()[0].Boot)
			assert.True(t, a.knows(mute.boot))
		}
		assert.Len(t, mute.Silent(), 4)
		assert.Zero(t, c.saw("failed"), "no flapping")
	})
}

// Every profile makes a working cluster.
func TestProfiles(t *testing.T) {
	for _, tc := range []struct {
		name      string
		heartbeat time.Duration
		kill      time.Duration
	}{{"auto", time.Second, 10 * time.Second}, {"lan", time.Second, 10 * time.Second}, {"large", time.Second, 20 * time.Second}, {"wan", 5 * time.Second, 120 * time.Second}} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				c.cfg.Profile = tc.name
				c.grow(5)
				known := func() bool {
					for _, a := range c.agents {
						a.mu.Lock()
						n := len(a.reports)
						a.mu.Unlock()
						if a.peers() != len(c.agents)-1 || n < len(c.agents)-1 {
							return false
						}
					}
					return true
				}
				t.Logf("complete after %v", c.until(15*time.Second, "complete", known))
				was := c.agents[1].report(c.agents[0].boot)
				time.Sleep(10 * tc.heartbeat)
				now := c.agents[1].report(c.agents[0].boot)
				assert.InDelta(t, 10, now.Seq-was.Seq, 4)
				assert.Equal(t, 12*tc.heartbeat/10, now.Heartbeat)
				victim := c.agents[4]
				victim.kill()
				c.agents = c.agents[:4]
				t.Logf("kill known after %v", c.until(tc.kill, "kill known", func() bool { return c.saw("failed n4.") == 4 }))
			})
		})
	}
	_, err := gossip.ProfileNamed("fast")
	require.EqualError(t, err, `gossip profile "fast": want auto, lan, large or wan`)
}
