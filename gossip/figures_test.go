package gossip_test

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/serf/serf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/routing"
)

// The tests here check the figures that the design was made from; each logs what it measured. Time is fake, so delays
// are those of the network in memory (0.2 to 2 ms) and CPU is not measured here.

const testKey = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

func keys(t testing.TB, texts ...string) (out [][]byte) {
	t.Helper()
	for _, s := range texts {
		k, err := gossip.ParseKeys(s)
		require.NoError(t, err)
		out = append(out, k...)
	}
	return out
}

// drive changes every agent's load so often that the rule publishes as fast as it may, and samples record ages.
func (c *cluster) drive(d time.Duration) (ages []time.Duration) {
	began := time.Now()
	for turn := 0; time.Since(began) < d; turn++ {
		for _, a := range c.agents {
			r := load(1)
			r.PendingTokens = routing.Some(turn % 2 * 100_000)
			a.Offer(r)
		}
		time.Sleep(49 * time.Millisecond)
		if turn%5 == 0 {
			for _, a := range c.agents {
				a.mu.Lock()
				for _, at := range a.heardAt {
					ages = append(ages, time.Since(at))
				}
				a.mu.Unlock()
			}
		}
	}
	slices.Sort(ages)
	return ages
}

func quantile(d []time.Duration, p float64) time.Duration {
	return d[int(p*float64(len(d)-1))].Round(time.Millisecond)
}

// How long a record needs from its publishing to the last peer, at 4 a second, and how old records are.
func TestSpread(t *testing.T) {
	for _, n := range []int{3, 10, 30} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				c.grow(n)
				c.until(15*time.Second, "complete", c.complete)
				time.Sleep(5 * time.Second)
				var last, ages []time.Duration
				lost := 0
				for turn := range 40 { // 10 s
					began := time.Now()
					mark := 100_000 - turn%2*90_000 + turn
					for _, a := range c.agents {
						r := load(1)
						r.PendingTokens = routing.Some(mark)
						a.Offer(r)
					}
					gap := time.Duration(rand.Int64N(int64(50 * time.Millisecond)))
					for range 5 { // samples at any age
						time.Sleep(gap)
						gap = 50 * time.Millisecond
						for _, a := range c.agents {
							a.mu.Lock()
							for _, at := range a.heardAt {
								ages = append(ages, time.Since(at))
							}
							a.mu.Unlock()
						}
					}
					time.Sleep(250*time.Millisecond - time.Since(began))
					for _, b := range c.agents {
						late := time.Duration(0)
						for _, a := range c.agents {
							a.mu.Lock()
							if r := a.reports[b.boot]; a != b && r.PendingTokens != routing.Some(mark) {
								lost++
							} else if a != b {
								late = max(late, a.heardAt[b.boot].Sub(began))
							}
							a.mu.Unlock()
						}
						last = append(last, late)
					}
				}
				slices.Sort(last)
				slices.Sort(ages)
				gossiptest.Figure(t, 1, "to the last peer p50 %.1f ms p99 %.1f ms, %d lost; age p50 %v p99 %v", quantileMS(last, .5), quantileMS(last, .99), lost, quantile(ages, .5), quantile(ages, .99))
				assert.Zero(t, lost)
				assert.LessOrEqual(t, quantileMS(last, .99), 50.0)
				assert.LessOrEqual(t, quantile(ages, .5), 150*time.Millisecond)
				assert.LessOrEqual(t, quantile(ages, .99), 350*time.Millisecond)
			})
		})
	}
}

func quantileMS(d []time.Duration, p float64) float64 {
	return float64(d[int(p*float64(len(d)-1))]) / float64(time.Millisecond)
}

// C75: 100 agents with a key, loads changing at the rate of the budget: news is coalesced and paced, so that ages, bytes and
// packets stay bounded.
func TestC75BudgetAt100(t *testing.T) {
	longOnly(t)
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.cfg.Keys, c.cfg.Cluster = keys(t, testKey), ""
		c.grow(100)
		c.until(15*time.Second, "complete", c.complete)
		time.Sleep(20 * time.Second) // the news of the joins is told
		c.drive(2 * time.Second)
		before, sent := c.net.Traffic(), c.agents[0].Stats().RecordsSent
		const secs = 6
		ages := c.drive(secs * time.Second)
		after := c.net.Traffic()
		records := float64(c.agents[0].Stats().RecordsSent-sent) / secs
		packets := float64(after.Packets-before.Packets) / secs / 100
		all := (float64(after.Bytes-before.Bytes)+float64(after.StreamBytes-before.StreamBytes))/secs/100 + 28*packets
		gossiptest.Figure(t, 2, "age p50 %v p99 %v; %.0f record packets/s = %.1f KiB/s; all: %.0f packets/s, %.1f KiB/s",
			quantile(ages, .5), quantile(ages, .99), records, records*119/1024, packets, all/1024)
		gossiptest.Figure(t, 25, "with a key, largest packet of 100 agents %d bytes", after.Largest)
		assert.LessOrEqual(t, quantile(ages, .5), 220*time.Millisecond)
		assert.LessOrEqual(t, quantile(ages, .99), 550*time.Millisecond)
		assert.LessOrEqual(t, records*119, 32.5*1024)
		assert.LessOrEqual(t, all, 40.0*1024)
		assert.LessOrEqual(t, packets, 410.0)
		assert.LessOrEqual(t, after.Largest, 1245)
	})
}

// Idle agents send heartbeats and little else.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(10)
		c.until(10*time.Second, "complete", c.complete)
		time.Sleep(10 * time.Second)
		before := c.net.Traffic()
		was := c.agents[1].report(c.agents[0].boot).Seq
		time.Sleep(30 * time.Second)
		after := c.net.Traffic()
		rate := float64(c.agents[1].report(c.agents[0].boot).Seq-was) / 30
		packets := float64(after.Packets-before.Packets) / 30 / 10
		out := float64(after.Bytes-before.Bytes)/30/10 + 28*packets
		gossiptest.Figure(t, 3, "%.2f records/s, %.1f packets/s, %.0f bytes/s with headers", rate, packets, out)
		assert.InDelta(t, 1, rate, 0.2)
		assert.LessOrEqual(t, out, 1500.0)
	})
}

// A jump of the predicted wait is at the peer at once, and never more than 10 records go out in a second.
func TestJump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(2)
		c.until(5*time.Second, "complete", c.complete)
		a, b := c.agents[0], c.agents[1]
		step := func(pending int) time.Duration {
			r := load(1)
			r.PendingTokens = routing.Some(pending)
			a.Offer(r)
			began := time.Now()
			for b.report(a.boot).PendingTokens != routing.Some(pending) {
				require.Less(t, time.Since(began), time.Second)
				time.Sleep(time.Millisecond)
				synctest.Wait()
			}
			return time.Since(began)
		}
		var calm, busy time.Duration
		var at []time.Time  // of the records, as b sees them
		for i := range 20 { // the predicted wait goes from 20 ms to 900 ms and back
			time.Sleep(time.Duration(500+i*37) * time.Millisecond)
			b.mu.Lock()
			since := time.Since(b.heardAt[a.boot])
			b.mu.Unlock()
			if took := step(7000); since > 105*time.Millisecond {
				calm = max(calm, took)
			} else { // a heartbeat went out just now
				busy = max(busy, took)
			}
			at = append(at, time.Now())
			busy = max(busy, step(0)) // just after a record
			at = append(at, time.Now())
		}
		for i := 10; i < len(at); i++ {
			assert.GreaterOrEqual(t, at[i].Sub(at[i-10]), time.Second, "at most 10 in a second")
		}
		gossiptest.Figure(t, 4, "worst of 20: %v, just after another record %v", calm, busy)
		assert.LessOrEqual(t, calm, 20*time.Millisecond)
		assert.LessOrEqual(t, busy, 130*time.Millisecond)
	})
}

// 200 restarts of one of ten: the list returns to its size, and so does what a state exchange carries.
func TestRestarts(t *testing.T) {
	if raceEnabled {
		t.Skip("slow with the race detector")
	}
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.cfg.SetTune(func(s *serf.Config) {
			s.ReconnectTimeout, s.TombstoneTimeout = 20*time.Second, 20*time.Second
			s.MemberlistConfig.GossipToTheDeadTime = 20 * time.Second
		})
		c.grow(10)
		c.until(10*time.Second, "complete", c.complete)
		exchange := func() float64 { // bytes of a state exchange, both ways, mean of ten minutes
			time.Sleep(30 * time.Second)
			a := c.net.Traffic()
			time.Sleep(10 * time.Minute)
			b := c.net.Traffic()
			return float64(b.StreamBytes-a.StreamBytes) / float64(b.Streams-a.Streams)
		}
		before := exchange()
		var m0, m1 runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m0)
		for i := range 200 {
			a := c.agents[9]
			if i%2 == 0 {
				a.kill()
			} else {
				a.stop()
				<-a.ended
			}
			c.agents = c.agents[:9]
			c.add("n9")
			time.Sleep(time.Second)
		}
		took := c.until(60*time.Second, "ten members again", func() bool {
			for _, a := range c.agents {
				if a.peers() != 9 || len(a.Members()) != 9 {
					return false
				}
			}
			return true
		})
		after := exchange()
		runtime.GC()
		runtime.ReadMemStats(&m1)
		gossiptest.Figure(t, 14, "member lists back to 10 after %v; an exchange has %.0f bytes before, %.0f after; heap %+d KiB an agent", took, before, after, (int64(m1.HeapAlloc)-int64(m0.HeapAlloc))>>10/10)
		assert.Less(t, int64(m1.HeapAlloc)-int64(m0.HeapAlloc), int64(10<<20))
		assert.InDelta(t, before, after, 0.1*before)
		assert.True(t, c.complete())
	})
}

// Tags change while loads flow; run with -race.
func TestTagsWhileLoadsFlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(5)
		c.until(10*time.Second, "complete", c.complete)
		for i := range 10 { // a change a second
			for _, a := range c.agents {
				a.Describe("vllm", routing.Some(uint32(i)))
			}
			c.drive(time.Second)
		}
		assert.Zero(t, c.saw("failed"))
		assert.NotZero(t, c.saw("updated"))
		gossiptest.Figure(t, 16, "50 changes of tags, %d of 5 agents saw them, no failed event", c.saw("updated"))
		assert.True(t, c.complete())
	})
}

// An application that does not take its member events stops neither loads nor probes, and gets the last state in the end.
func TestBlockedConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(5)
		c.until(10*time.Second, "complete", c.complete)
		a := c.agents[0]
		block := make(chan struct{})
		a.mu.Lock()
		a.block = block
		a.mu.Unlock()
		late := c.add("late") // its event blocks a
		time.Sleep(time.Second)
		gone := c.agents[4]
		gone.kill()
		was := a.report(c.agents[1].boot).Seq
		time.Sleep(10 * time.Second)
		assert.GreaterOrEqual(t, a.report(c.agents[1].boot).Seq-was, uint32(8), "loads go on")
		for _, x := range c.agents[1:4] {
			assert.False(t, x.saw("failed n0"), "no probe failure")
		}
		assert.False(t, a.saw("failed n4"))
		close(block)
		c.until(100*time.Millisecond, "told in the end", func() bool { return a.saw("failed n4") && a.saw("joined late") && a.knows(late.boot) })
		gossiptest.Figure(t, 17, "%d records in 10 s while the consumer was blocked; told of a joiner and a kill afterwards", a.report(c.agents[1].boot).Seq-was)
		c.until(1300*time.Millisecond, "its load too", func() bool { return a.report(late.boot).Boot == late.boot })
	})
}

// Without the key nothing of a record can be read from the wire.
func TestNoPlaintext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, encrypted := range []bool{false, true} {
			c := newCluster(t)
			if encrypted {
				c.cfg.Keys = keys(t, testKey)
			}
			boot := []byte{1, 0, 0, 0, 1, 0, 0, 0} // little endian of the first agent's
			seen := 0
			c.net.Tap(func(_, _ string, b []byte) {
				if bytes.Contains(b, boot) || bytes.Contains(b, []byte("0000000100000001")) {
					seen++
				}
			})
			c.grow(3)
			c.until(10*time.Second, "complete", c.complete)
			time.Sleep(3 * time.Second)
			c.net.Tap(nil) // takes the network's lock, under which seen is counted
			assert.Equal(t, encrypted, seen == 0)
			if encrypted {
				gossiptest.Figure(t, 18, "%d packets and streams with a readable boot id", seen)
			}
			for _, a := range c.agents {
				a.kill()
			}
		}
	})
}

const otherKey = "/////wQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

// Keys are rolled one agent after the other while loads flow, and agents join at every step; also where a tenth of the
// packets is lost, the word of who can read which key among them.
func TestKeyRotation(t *testing.T) {
	for _, loss := range []float64{0, 0.1} {
		t.Run(fmt.Sprintf("%.0f %% lost", 100*loss), func(t *testing.T) { rotateKeys(t, loss) })
	}
}

func rotateKeys(t *testing.T, loss float64) {
	const repair = 30 * time.Second // word of a tag may miss somebody, who then learns it by an exchange of states, each 10 s
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		oldKey, newKey := keys(t, testKey), keys(t, otherKey)
		both := append(slices.Clone(newKey), oldKey...)
		worst := time.Duration(0)
		flow := func(d time.Duration) { // loads flow, and nobody is silent for long
			c.drive(d)
			for _, a := range c.agents {
				a.mu.Lock()
				worst = max(worst, a.offBy)
				a.mu.Unlock()
			}
		}
		c.cfg.Keys = oldKey
		c.grow(5)
		c.until(10*time.Second, "complete", c.complete)
		c.net.SetLoss(loss)

		c.cfg.Keys = both
		c.add("early") // knows both, the cluster only the old one
		c.until(8*time.Second, "joined before the change", c.complete)
		for i, a := range c.agents[:5] {
			require.NoError(t, a.SetKeys(both))
			flow(2 * time.Second)
			want := i == 4
			c.until(repair, "used once all know it", func() bool { return a.Keys()[0].Sending == want })
		}
		c.until(repair, "all send with the new key", func() bool {
			for _, a := range c.agents {
				if k := a.Keys(); !k[0].Sending || k[0].KnownBy != 6 {
					return false
				}
			}
			return true
		})
		c.cfg.Keys = newKey
		c.add("new-only")
		c.until(8*time.Second, "joined with the new key alone", c.complete)
		for _, a := range c.agents {
			require.NoError(t, a.SetKeys(newKey))
			flow(time.Second)
		}
		time.Sleep(5 * time.Second)
		c.until(repair, "complete with the new key alone", c.complete)
		assert.Zero(t, c.saw("failed"))
		for _, a := range c.agents {
			assert.Equal(t, []gossip.KeyInfo{{ID: gossip.KeyID(newKey[0]), Sending: true, KnownBy: 7}}, a.Keys())
		}
		assert.Error(t, c.agents[0].UseKey("00000000"))
		gossiptest.Figure(t, 19, "7 agents, %.0f %% of the packets lost: longest gap between two records of anybody %v, no failed event", 100*loss, worst)
		if loss == 0 { // of the waits in between some lose several heartbeats in a row
			assert.Less(t, worst, 3600*time.Millisecond)
		}
	})
}

// A stock Serf node in the cluster stays alive, disturbs nobody and is no replica.
func TestStockSerf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(3)
		c.until(10*time.Second, "complete", c.complete)
		conf := serf.DefaultConfig()
		conf.NodeName = "stock"
		conf.MemberlistConfig = memberlist.DefaultLANConfig()
		conf.MemberlistConfig.Transport = c.net.Listen()
		conf.MemberlistConfig.Label = "test"
		quiet := log.New(io.Discard, "", 0)
		conf.Logger, conf.MemberlistConfig.Logger, conf.LogOutput, conf.MemberlistConfig.LogOutput = quiet, quiet, nil, nil
		s, err := serf.Create(conf)
		require.NoError(t, err)
		_, err = s.Join([]string{c.agents[0].Addr()}, true)
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		for _, a := range c.agents {
			assert.Equal(t, 1, a.Stats().Foreign)
			assert.Equal(t, 3, a.Alive())
			assert.False(t, a.saw("joined stock"))
		}
		assert.Len(t, s.Members(), 4)
		for _, m := range s.Members() {
			assert.Equal(t, serf.StatusAlive, m.Status)
		}
		assert.True(t, c.complete())
		gossiptest.Figure(t, 20, "stock node alive with 4 members after 10 s, %d replicas for ours", c.agents[0].Alive())
		require.NoError(t, s.Shutdown())
	})
}

// A flood of records from nowhere leaves memory flat, and a real late joiner is not lost in it.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(3)
		c.until(10*time.Second, "complete", c.complete)
		from := c.net.Listen()
		for i := range 10_000 {
			r := load(1)
			r.Boot, r.Seq = 1<<60|uint64(i), 1
			// label header (type 244, length, text), memberlist's user message (8), our type
			msg := gossip.EncodeReport(append([]byte{244, 4}, "test\x08\xC7"...), &r)
			_, err := from.WriteTo(msg, c.agents[0].Addr())
			require.NoError(t, err)
			if i%1000 == 0 {
				time.Sleep(10 * time.Millisecond)
			}
		}
		time.Sleep(time.Second)
		s := c.agents[0].Stats()
		gossiptest.Figure(t, 21, "parked %d, dropped for lack of room %d of 10,000", s.Parked, s.Dropped["flood"])
		assert.LessOrEqual(t, s.Parked, 256)
		assert.Greater(t, s.Dropped["flood"], uint64(5000))
		c.add("late")
		c.until(3*time.Second, "late joiner", c.complete)
	})
}
