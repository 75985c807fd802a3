package gossiptest

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// inbox is how many packets wait at a host before more are dropped, as with a socket buffer.
const inbox = 4096

// Network connects transports. Its settings may change at any time and hold from then on.
type Network struct {
	mu       sync.Mutex
	rnd      *rand.Rand
	hosts    map[string]*Transport
	next     netip.Addr
	minDelay time.Duration
	maxDelay time.Duration
	loss     float64
	side     map[string]int  // partition: hosts on different sides do not reach each other
	noUDP    map[string]bool // hosts that neither send nor get packets; streams work
	traffic  Traffic
	tap      func(from, to string, b []byte)
}

// Traffic counts packets, their payload bytes, streams and theirs over the whole network.
type Traffic struct {
	Packets, Bytes, Lost, Streams, StreamBytes uint64
	Largest                                    int // payload bytes of the largest packet
}

// New returns a network without delay and loss.
func New(seed uint64) *Network {
	return &Network{
		rnd: rand.New(rand.NewPCG(seed, 0x67617065)), hosts: make(map[string]*Transport),
		next: netip.AddrFrom4([4]byte{10, 0, 0, 0}), noUDP: make(map[string]bool),
	}
}

// SetDelay makes every packet take from lo to hi, evenly spread; packets therefore overtake each other.
func (n *Network) SetDelay(lo, hi time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.minDelay, n.maxDelay = lo, max(lo, hi)
}

// SetLoss drops this share of the packets, 0 to 1.
func (n *Network) SetLoss(share float64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loss = share
}

// Partition cuts the network: hosts of different groups do not reach each other, hosts in no group form one more group.
func (n *Network) Partition(groups ...[]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.side = make(map[string]int)
	for i, g := range groups {
		for _, a := range g {
			n.side[a] = i + 1
		}
	}
}

// Heal ends the partition.
func (n *Network) Heal() { n.Partition() }

// BlockUDP makes a host deaf and mute for packets; streams still work.
func (n *Network) BlockUDP(addr string, blocked bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if blocked {
		n.noUDP[addr] = true
	} else {
		delete(n.noUDP, addr)
	}
}

// Tap calls f with every packet and every piece written to a stream, the lost ones included, under the network's lock.
func (n *Network) Tap(f func(from, to string, b []byte)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tap = f
}

// Traffic returns the counters.
func (n *Network) Traffic() Traffic {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.traffic
}

// Listen returns a transport for a new host on port 7946.
func (n *Network) Listen() *Transport {
	n.mu.Lock()
	n.next = n.next.Next()
	addr := netip.AddrPortFrom(n.next, 7946).String()
	n.mu.Unlock()
	return n.ListenAt(addr)
}

// ListenAt returns a transport for ip:port, also for one whose former owner was shut down.
func (n *Network) ListenAt(addr string) *Transport {
	t := newTransport(n, netip.MustParseAddrPort(addr))
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts[addr] = t
	return t
}

// route decides about one packet: to whom and after which delay; nil if it is lost.
func (n *Network) route(from, to string, b []byte) (*Transport, time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tap != nil {
		n.tap(from, to, b)
	}
	size := len(b)
	n.traffic.Packets++
	n.traffic.Bytes += uint64(size)
	n.traffic.Largest = max(n.traffic.Largest, size)
	t := n.hosts[to]
	if t == nil || n.side[from] != n.side[to] || n.noUDP[from] || n.noUDP[to] || (n.loss > 0 && n.rnd.Float64() < n.loss) {
		n.traffic.Lost++
		return nil, 0
	}
	return t, n.delay()
}

// dial decides about one stream.
func (n *Network) dial(from, to string) (t *Transport, delay time.Duration, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.traffic.Streams++
	return n.hosts[to], 2 * n.delay(), n.side[from] != n.side[to]
}

// write counts and taps a piece of a stream; it reports whether the hosts are cut apart.
func (n *Network) write(from, to string, b []byte) (cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.traffic.StreamBytes += uint64(len(b))
	if n.tap != nil {
		n.tap(from, to, b)
	}
	return n.side[from] != n.side[to]
}

func (n *Network) delay() time.Duration {
	if n.maxDelay == n.minDelay {
		return n.minDelay
	}
	return n.minDelay + time.Duration(n.rnd.Int64N(int64(n.maxDelay-n.minDelay)))
}

func (n *Network) forget(addr string, t *Transport) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.hosts[addr] == t {
		delete(n.hosts, addr)
	}
}
