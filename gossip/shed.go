package gossip

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// Shedding: gossip must not become the load. If the records took more than 2 % of a core over 10 s, half as many packets
// may go out, down to 100/s; below 0.5 % the budget doubles again.
const (
	shedWindow  = 10 * time.Second
	shedAbove   = 0.02
	growBelow   = 0.005
	firstCost   = 10 * time.Microsecond // what a sending is taken for at first
	receiveCost = 6 * time.Microsecond  // of the socket, decryption and memberlist for one record, before we see it
)

// effort estimates the CPU time that records took from the wall time of single operations. Where others want the core,
// many an operation includes a wait for it, so not the sum is taken but the median (which steps of 1/32 follow) times
// their number; a hundred starved agents on two cores looked four times as dear as they were before that.
type effort struct {
	send, receive atomic.Int64 // medians, ns
	spent         atomic.Int64 // ns in this window
}

// sent adds n sendings that took d together.
func (e *effort) sent(n int, d time.Duration) {
	if n > 0 {
		e.spent.Add(int64(n) * follow(&e.send, int64(d)/int64(n)))
	}
}

// received adds one record that took d from NotifyMsg on.
func (e *effort) received(d time.Duration) {
	e.spent.Add(int64(receiveCost) + follow(&e.receive, int64(d)))
}

// follow moves a running median towards a sample and returns it. Lost races cost nothing but a step.
func follow(median *atomic.Int64, sample int64) int64 {
	m := median.Load()
	switch {
	case m == 0:
		m = int64(firstCost)
	case sample > m:
		m += m/32 + 1
	case sample < m:
		m -= m / 32
	}
	median.Store(m)
	return m
}

// nextPackets is the packet budget after a window in which records took share of a core.
func nextPackets(packets int, share float64) int {
	switch {
	case share > shedAbove:
		return max(packets/2, minPacketBudget)
	case share < growBelow:
		return min(packets*2, packetBudget)
	}
	return packets
}

// shed is the goroutine that adapts the packet budget.
func (n *Node) shed(ctx context.Context) {
	for sleep(ctx, shedWindow) {
		share := float64(n.effort.spent.Swap(0)) / float64(shedWindow)
		n.pub.mu.Lock()
		was := n.pub.packets
		now := nextPackets(was, share)
		n.pub.packets = now
		if now != was {
			n.pub.peers = -1 // makes the budget anew
		}
		n.pub.mu.Unlock()
		if now < was {
			n.log.Warn("gossip takes too much CPU, sending fewer records", slog.Int("packets_per_second", now), slog.Float64("share_of_core", share))
		}
	}
}
