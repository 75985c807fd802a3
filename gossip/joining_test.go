package gossip_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
)

// headless is a DNS name whose addresses change, as those of a headless Service do.
type headless struct {
	mu    sync.Mutex
	addrs []netip.Addr
}

func (h *headless) set(agents ...*agent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.addrs = nil
	for _, a := range agents {
		h.addrs = append(h.addrs, netip.MustParseAddrPort(a.Addr()).Addr())
	}
}

func (h *headless) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if host != "grapevine" || h.addrs == nil {
		return nil, errors.New("no such host")
	}
	return append([]netip.Addr(nil), h.addrs...), nil
}

func (h *headless) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	return "", nil, errors.New("no such host")
}

// The headless Service is published after the agents start, first with one of them.
func TestLateDNS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		dns := &headless{}
		c.cfg.Resolver = dns
		for _, name := range []string{"a", "b", "c"} {
			c.seeds = []string{"grapevine", "grapevine", "grapevine"}
			c.add(name)
		}
		time.Sleep(30 * time.Second)
		a := c.agents[0]
		assert.Equal(t, 1, a.Alive())
		assert.Equal(t, 1, a.log.count("join address unreachable"), a.log.String())
		assert.Equal(t, []string{"grapevine: does not resolve: no such host"}, a.Stats().Unreachable)

		dns.set(a)
		took := c.until(8*time.Second, "joined by the name", c.complete)
		t.Logf("complete %v after the name appeared", took)
		for _, x := range c.agents[1:] {
			assert.Empty(t, x.Stats().Unreachable)
			assert.Contains(t, x.log.String(), "join address reached")
		}

		// One dies and stays in DNS: no reason to warn about the name.
		dns.set(c.agents...)
		c.agents[2].kill()
		time.Sleep(20 * time.Minute)
		for _, x := range c.agents[:2] {
			assert.Equal(t, 1, x.log.count("join address unreachable"), x.log.String())
			assert.Empty(t, x.Stats().Unreachable)
		}
	})
}

// A pod that was not there at the start, or two clusters that formed apart, are found by the look at the seeds.
func TestTwoHalvesFindEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		dns := &headless{}
		c.cfg.Resolver = dns
		c.seeds = []string{"grapevine", "grapevine", "grapevine"}
		for _, name := range []string{"a", "b", "c", "d"} {
			c.agents = append(c.agents, build(t, name, uint64(len(c.agents)+1)<<32|1, withTransport(c.cfg, c.net.Listen(), c.seeds)))
		}
		dns.set(c.agents[0], c.agents[1])
		c.agents[0].run()
		c.agents[1].run()
		c.until(5*time.Second, "first half", func() bool { return c.agents[0].Alive() == 2 })
		dns.set(c.agents[2], c.agents[3])
		c.agents[2].run()
		c.agents[3].run()
		c.until(5*time.Second, "second half", func() bool { return c.agents[2].Alive() == 2 })
		dns.set(c.agents...)
		took := c.until(73*time.Second, "one cluster", func() bool {
			return c.agents[0].Alive() == 4 && c.agents[3].Alive() == 4
		})
		t.Logf("one cluster after %v", took)
	})
}

func withTransport(cfg gossip.Config, tr *gossiptest.Transport, seeds []string) gossip.Config {
	cfg.Transport, cfg.Join = tr, seeds
	return cfg
}

// An address that does not answer is a warning, never an obstacle, and is used once it answers.
func TestUnreachableSeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.seeds = []string{"10.0.0.9:7946"}
		a := c.add("a")
		time.Sleep(20 * time.Second)
		assert.Equal(t, 1, a.log.count("level=WARN"), a.log.String())
		assert.Contains(t, a.log.String(), `msg="join address unreachable, keep trying" address=10.0.0.9:7946 error="failed to join 10.0.0.9:7946: dial tcp: connection refused"`)
		require.Len(t, a.Stats().Unreachable, 1)

		b := build(t, "b", 99<<32, withTransport(c.cfg, c.net.ListenAt("10.0.0.9:7946"), nil))
		b.run()
		c.agents = append(c.agents, b)
		c.until(8*time.Second, "joined", func() bool { return a.Alive() == 2 && b.Alive() == 2 })
		assert.Empty(t, a.Stats().Unreachable)
	})
}

// 100 agents start within 2.5 s through three seeds; all know all in 15 s, without help.
func TestMassStart(t *testing.T) {
	if raceEnabled {
		t.Skip("100 agents, ten times slower")
	}
	wall := time.Now()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		began := time.Now()
		for len(c.agents) < 100 {
			c.add(fmt.Sprintf("n%d", len(c.agents)))
			time.Sleep(25 * time.Millisecond)
		}
		took := c.until(15*time.Second-time.Since(began), "complete", c.complete)
		gossiptest.Figure(t, 15, "complete %v after the first start, %v after the last", time.Since(began), took)
	})
	t.Logf("wall time %v", time.Since(wall))
}
