package gossip_test

import (
	"bytes"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
)

// What the packets on the wire say about their sender: memberlist's form of them is not ours to change.
func TestSender(t *testing.T) {
	for _, tc := range []struct{ name, key, cluster string }{{"plain", "", ""}, {"label", "", "test"}, {"key", testKey, ""}, {"both", testKey, "test"}} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				c.cfg.Cluster = tc.cluster
				if tc.key != "" {
					c.cfg.Keys = keys(t, tc.key)
				}
				var packets [][]byte
				c.net.Tap(func(_, _ string, b []byte) { packets = append(packets, bytes.Clone(b)) })
				c.grow(3)
				c.until(10*time.Second, "complete", c.complete)
				time.Sleep(3 * time.Second)
				c.net.Tap(nil)
				seen := map[uint64]int{}
				for _, p := range packets {
					if boot, ok := c.agents[0].Sender(p); ok {
						seen[boot]++
					}
				}
				for _, a := range c.agents {
					assert.GreaterOrEqual(t, seen[a.boot], 4, "records of %x in %d packets", a.boot, len(packets))
				}
				assert.Len(t, seen, 3)
			})
		})
	}
}

// An agent that advertises an address where it is not to be reached gets no requests, and the log says why, once. It
// does not come and go as member, as memberlist would have it.
func TestTranslated(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs the whole of 127.0.0.0/8 on loopback")
	}
	cfg := gossip.Config{Listen: "127.0.0.1:0", Cluster: "test", Keys: keys(t, testKey)}
	a := start(t, "a", 0xA00000001, cfg)
	a.Offer(load(1))
	cfg.Join = []string{a.Addr()}
	b := start(t, "b", 0xB00000001, cfg)
	b.Offer(load(1))
	cfg.Listen, cfg.Advertise = "127.0.0.2:0", "127.0.0.3"
	m := start(t, "m", 0xC00000001, cfg)
	m.Offer(load(1))
	require.Eventually(t, func() bool {
		return strings.Contains(a.log.String(), "address translation is not supported") && strings.Contains(b.log.String(), "address translation is not supported")
	}, 10*time.Second, 20*time.Millisecond, "%s", a.log)
	assert.Contains(t, a.log.String(), "member gets no requests")
	assert.Contains(t, a.log.String(), "it advertises 127.0.0.3:")
	assert.Contains(t, a.log.String(), "and its packets come from 127.0.0.2")
	for _, x := range []*agent{a, b} {
		require.Eventually(t, func() bool { return !x.knows(m.boot) }, time.Second, 10*time.Millisecond)
		assert.Equal(t, 2, x.Alive())
		assert.Equal(t, 1, x.Stats().Foreign)
	}
	joined := a.log.count("member joined")
	time.Sleep(3 * time.Second)
	assert.Equal(t, joined, a.log.count("member joined"), "no flapping")
	assert.False(t, a.knows(m.boot))
	assert.True(t, a.knows(b.boot))
}

// A node ends while packets in a member's name come from an address that is no member's, each of which starts a check.
func TestCloseAmongStrangers(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs the whole of 127.0.0.0/8 on loopback")
	}
	stranger, err := net.ListenPacket("udp", "127.0.0.3:0")
	require.NoError(t, err)
	defer stranger.Close()
	b := start(t, "b", 0xB00000001, gossip.Config{Listen: "127.0.0.1:0"})
	b.Offer(load(1))
	r := load(1)
	r.Boot, r.Seq = b.boot, 1
	packet := gossip.EncodeReport([]byte{8, 0xC7}, &r) // memberlist's user message, our type
	checks := 0
	for i := range 8 {
		a := build(t, "a", uint64(0xA00000001+i), gossip.Config{Listen: "127.0.0.1:0", Join: []string{b.Addr()}})
		a.run()
		require.Eventually(t, func() bool { return a.knows(b.boot) }, 5*time.Second, time.Millisecond)
		to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(a.Addr()))
		flood := make(chan struct{})
		go func() {
			defer close(flood)
			for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
				_, _ = stranger.WriteTo(packet, to) // nobody there any more is fine
			}
		}()
		time.Sleep(time.Duration(i) * time.Millisecond / 2)
		a.Close()
		<-flood
		a.end()
		checks += a.Node.Checked()
	}
	assert.Positive(t, checks, "some checks were started")
}
