package gossip_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Packets that somebody recorded and sends again later are harmless, whatever they were: in their own cluster records and news
// are old and counted as such, and a member that left stays away; another cluster, by key or by name only, opens none of them,
// counts each and answers nothing.
func TestReplayedPackets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.cfg.Keys = keys(t, testKey)
		c.grow(5)
		c.until(10*time.Second, "complete", c.complete)
		victim, leaver := c.agents[0], c.agents[4]

		var mu sync.Mutex
		var recorded [][]byte
		recording := true
		c.net.Tap(func(_, to string, b []byte) {
			mu.Lock()
			defer mu.Unlock()
			if recording && to == victim.Addr() {
				recorded = append(recorded, append([]byte(nil), b...))
			}
		})
		c.drive(5 * time.Second)
		time.Sleep(5 * time.Second)
		mu.Lock()
		recording = false
		mu.Unlock()
		require.Greater(t, len(recorded), 100)

		leaver.stop()
		<-leaver.ended
		c.agents = c.agents[:4]
		c.until(10*time.Second, "the leave", func() bool { return c.saw("left n4.") == 4 })
		time.Sleep(time.Minute)

		thief := c.net.Listen()
		t.Cleanup(func() { _ = thief.Shutdown() })
		replay := func(to string) (sent int) {
			for _, b := range recorded {
				_, _ = thief.WriteTo(b, to)
				sent += len(b)
				time.Sleep(time.Millisecond)
			}
			time.Sleep(5 * time.Second)
			return sent
		}
		var answered int
		c.net.Tap(func(_, to string, b []byte) {
			mu.Lock()
			defer mu.Unlock()
			if to == thief.Addr() {
				answered += len(b)
			}
		})
		took := func() int {
			mu.Lock()
			defer mu.Unlock()
			n := answered
			answered = 0
			return n
		}
		before, seq := victim.Stats(), victim.report(c.agents[1].boot).Seq
		sent := replay(victim.Addr())
		after, out := victim.Stats(), took()
		dropped := func(d map[string]uint64) (n uint64) {
			for _, v := range d {
				n += v
			}
			return n
		}
		t.Logf("own cluster: %d packets, %d bytes in, %d bytes out; %d records dropped", len(recorded), sent, out, dropped(after.Dropped)-dropped(before.Dropped))
		assert.LessOrEqual(t, out, sent, "no amplification")
		assert.Greater(t, dropped(after.Dropped)-dropped(before.Dropped), uint64(50), "counted")
		assert.False(t, victim.knows(leaver.boot), "who left stays away")
		assert.True(t, victim.HasLeft(leaver.boot))
		assert.GreaterOrEqual(t, victim.report(c.agents[1].boot).Seq, seq, "no record goes back")
		assert.True(t, c.complete())
		assert.Zero(t, c.saw("failed"), "nor is it taken for a new one that fails")

		for name, change := range map[string]func(*cluster){
			"another key":           func(o *cluster) { o.cfg.Keys = keys(t, otherKey) },
			"another name, our key": func(o *cluster) { o.cfg.Cluster = "other" },
		} {
			o := &cluster{t: t, net: c.net, cfg: c.cfg, next: 90}
			change(o)
			x := o.add("x-" + name[:7])
			time.Sleep(2 * time.Second)
			lines := x.log.count("level=ERROR") + x.log.count("level=WARN")
			sent := replay(x.Addr())
			lines = x.log.count("level=ERROR") + x.log.count("level=WARN") - lines
			t.Logf("%s: %d packets, %d bytes in, %d bytes out; %d counted as a stranger's, %d lines of log", name, len(recorded), sent, took(), x.Stats().Strangers, lines)
			assert.EqualValues(t, len(recorded), x.Stats().Strangers)
			assert.Zero(t, answered)
			assert.Equal(t, 1, x.Alive())
			assert.LessOrEqual(t, lines, 4)
			assert.NotZero(t, lines)
			x.end()
		}
	})
}
