package gossip_test

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/gossip"
)

// C73: an agent that is killed and starts again at the same address and port is one replica: the address is once in every
// list, whether the old entry was still taken for alive or had failed, and its traffic goes to the newest start.
func TestC73SameAddressTwice(t *testing.T) {
	for name, wait := range map[string]time.Duration{"old entry alive": 0, "old entry failed": 20 * time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				c.grow(4)
				c.until(10*time.Second, "complete", c.complete)
				old := c.agents[3]
				addr := old.Addr()
				old.kill()
				c.agents = c.agents[:3]
				time.Sleep(wait)
				cfg := c.cfg
				cfg.Transport, cfg.Join = c.net.ListenAt(addr), c.seeds
				again := build(t, "other-name", 77<<32|1, cfg)
				again.run()
				again.Offer(load(1))
				c.agents = append(c.agents, again)
				once := func() bool {
					for _, a := range c.agents {
						at := map[string]int{}
						for _, m := range a.Members() { // the dead included, not ourselves
							if m.Alive {
								at[m.GossipAddr]++
							}
						}
						if len(at) != 3 || a.peers() != 3 || a.Alive() != 4 || a.knows(old.boot) || a != again && at[addr] != 1 {
							return false
						}
					}
					return c.complete()
				}
				took := c.until(12*time.Second, "each address once", once)
				t.Logf("each address once, and complete, after %v", took)
				time.Sleep(30 * time.Second)
				assert.True(t, once(), "and so it stays")
			})
		})
	}
}

// C76: leaving is best effort with a bound. An agent whose peers are all unreachable ends all the same, and one of 50 too;
// that others stop choosing it does not hang on the leave, since the goodbye in its record is out at once.
func TestC76LeaveIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(50)
		c.until(15*time.Second, "complete", c.complete)
		leave := func(a *agent) time.Duration {
			begin := time.Now()
			a.stop()
			select {
			case <-a.ended:
			case <-time.After(time.Minute):
				t.Fatal("it never ends")
			}
			return time.Since(begin)
		}
		cut := c.agents[49]
		c.agents = c.agents[:49]
		c.net.Partition(addrs(c.agents), []string{cut.Addr()})
		took := leave(cut)
		t.Logf("nobody reachable: ended after %v", took)
		assert.LessOrEqual(t, took, 5*time.Second)
		c.net.Heal()

		other := c.agents[48]
		c.agents = c.agents[:48]
		took = leave(other)
		t.Logf("one of 49: ended after %v", took)
		assert.LessOrEqual(t, took, 5*time.Second)
		assert.True(t, c.agents[0].report(other.boot).Goodbye)
		c.until(10*time.Second, "left for all", func() bool { return c.saw("left n48.") == 48 })
	})
}

// C77: every agent of three is replaced by one at another address, and DNS is 10 s late each time: names are resolved again
// while a cluster looks too small, so all find each other without a hand.
func TestC77AllAddressesChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		dns := &headless{}
		c.cfg.Resolver = dns
		add := func(name string) {
			c.seeds = []string{"grapevine", "grapevine", "grapevine"}
			c.add(name)
		}
		for _, name := range []string{"a", "b", "c"} {
			add(name)
			dns.set(c.agents...)
		}
		c.until(20*time.Second, "complete", c.complete)
		for _, name := range []string{"a", "b", "c"} {
			c.agents[0].kill()
			c.agents = c.agents[1:]
			add(name)
			time.Sleep(10 * time.Second)
			dns.set(c.agents...)
		}
		took := c.until(30*time.Second, "all three see three", func() bool {
			for _, a := range c.agents {
				if a.Alive() != 3 {
					return false
				}
			}
			return c.complete()
		})
		t.Logf("complete %v after the last change in DNS", took)
	})
}

// C78: the name does not exist for a minute, then holds our own address only, then all three: nobody ends, each serves alone
// (see agent.TestStartUp), our own address is no member, and the rest is found within 10 s.
func TestC78NameComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		dns := &headless{}
		c.cfg.Resolver = dns
		for _, name := range []string{"a", "b", "c"} {
			c.seeds = []string{"grapevine"}
			c.add(name)
			c.seeds = nil
		}
		time.Sleep(time.Minute)
		for _, a := range c.agents {
			assert.Equal(t, 1, a.Alive())
		}
		a := c.agents[0]
		dns.set(a) // b and c find a by it; a finds itself
		c.until(10*time.Second, "joined by the one address", c.complete)
		assert.Equal(t, 3, a.Alive(), "its own address counts once")
		c.until(8*time.Second, "its own address is no address that does not answer", func() bool { return len(a.Stats().Unreachable) == 0 })
		dns.set(c.agents...)
		time.Sleep(time.Minute)
		assert.True(t, c.complete())
	})
}

// C79: without an address of RFC 1918 gossip starts all the same: a given address is used as it is, whatever its range, and
// else that of the default route. There is no list of interfaces to choose from, since the route's is what peers see.
func TestC79AnyRangeWillDo(t *testing.T) {
	for _, given := range []string{"100.64.3.4", "203.0.113.9", "8.8.4.4", "fd00::1", "2001:db8::9"} {
		got, err := gossip.AdvertiseAddr(":7946", given, nil)
		assert.NoError(t, err, given)
		assert.Equal(t, netip.MustParseAddr(given), got)
		got, err = gossip.AdvertiseAddr(netip.AddrPortFrom(netip.MustParseAddr(given), 7946).String(), "", nil)
		assert.NoError(t, err, given)
		assert.Equal(t, netip.MustParseAddr(given), got, "listening there is enough")
	}
}

// C80: five minutes with UDP blocked at one member, both ways, then only towards it: no flap, it is named, and nothing else
// changes. Its records then come over the peer link; see agent.TestUDPBlocked.
func TestC80NoFlapsWithoutUDP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(5)
		c.until(10*time.Second, "complete", c.complete)
		c.net.BlockUDP(c.agents[4].Addr(), true)
		for range 10 {
			time.Sleep(30 * time.Second)
			assert.Zero(t, c.saw("failed"))
			for _, a := range c.agents[:4] {
				if assert.Len(t, a.Silent(), 1) {
					assert.Equal(t, c.agents[4].boot, a.Silent()[0].Boot)
				}
			}
		}
		assert.True(t, c.completeAmong(c.agents[:4]) || c.agents[0].Alive() == 5, "the others talk as before")
		assert.Equal(t, 5, c.agents[0].Alive())
	})
}

// C81: one agent is cut off for 2.5 s every 20 s, for five minutes. It may be taken for dead, and take others for dead, but
// everyone is back with its load within 3 s of the end of the cut, as the same member: no new start, so no slow start
// (routing.TestC81BackAsBefore). An agent that is only stopped, which suspects nobody, is test/chaos's TestStopAgent.
func TestC81ShortStalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.grow(20)
		c.until(15*time.Second, "complete", c.complete)
		time.Sleep(10 * time.Second)
		stalled, others := c.agents[19], c.agents[:19]
		worst := time.Duration(0)
		for range 15 {
			c.net.Partition(addrs(others), []string{stalled.Addr()})
			time.Sleep(2500 * time.Millisecond)
			c.net.Heal()
			took := c.until(3*time.Second, "back", c.complete)
			worst = max(worst, took)
			time.Sleep(17500*time.Millisecond - took)
			assert.True(t, c.complete(), "and no flap until the next one")
		}
		t.Logf("all back at most %v after a stall", worst)
		assert.Zero(t, c.saw("left"))
	})
}
