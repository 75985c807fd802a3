//go:build unix

package gossip_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/routing"
)

// CPU can only be measured over real sockets: ten agents of this process on loopback, idle and driven as fast as the rule
// lets them, with and without a key.
func TestCPU(t *testing.T) {
	longOnly(t)
	const n, window = 10, 8 * time.Second
	share := func(key, busy bool) float64 { // of a core, an agent
		cfg := gossip.Config{Listen: "127.0.0.1:0", Cluster: "cpu"}
		if key {
			cfg.Keys = keys(t, testKey)
		}
		var agents []*agent
		for i := range n {
			a := build(t, fmt.Sprintf("n%d", i), uint64(i+1)<<32|1, cfg)
			a.run()
			defer a.end()
			a.Offer(load(i))
			agents = append(agents, a)
			cfg.Join = []string{agents[0].Addr()}
		}
		require.Eventually(t, func() bool {
			for _, a := range agents {
				if a.Alive() != n {
					return false
				}
			}
			return true
		}, 15*time.Second, 20*time.Millisecond)
		time.Sleep(5 * time.Second) // the news of the joins is told
		was, began := cpuTime(), time.Now()
		for turn := 0; time.Since(began) < window; turn++ {
			for i, a := range agents {
				r := load(i)
				if busy {
					r.PendingTokens = routing.Some(turn % 2 * 100_000)
				}
				a.Offer(r)
			}
			time.Sleep(50 * time.Millisecond)
		}
		return (cpuTime() - was).Seconds() / time.Since(began).Seconds() / n
	}
	idle, plain, keyed := share(true, false), share(false, true), share(true, true)
	gossiptest.Figure(t, 3, "over real sockets with a key: %.2f %% of a core an agent", 100*idle)
	gossiptest.Figure(t, 18, "CPU with a key %.2f × without (%.2f %% and %.2f %% of a core an agent)", keyed/plain, 100*keyed, 100*plain)
	assert.LessOrEqual(t, idle, 0.003)
	assert.LessOrEqual(t, keyed/plain, 1.5)
}

func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r) // cannot fail for ourselves
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
