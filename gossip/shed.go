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
	receiveCost = 6 * time.Microsecond // of the socket, decryption and memberlist for one record, before we see it
)

// effort adds up the time that records took. Sending is measured; receiving is measured from NotifyMsg on.
type effort struct{ spent atomic.Int64 }

func (e *effort) add(d time.Duration) { e.spent.Add(int64(d)) }

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
