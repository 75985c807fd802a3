package gossip

import (
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
)

// hook wraps a transport for two purposes. It counts what goes out, and it lets us put our delegate around
// Serf's: serf.Create sets its own delegate on memberlist's configuration, and memberlist asks the transport for its
// address before it starts any goroutine, so the first FinalAdvertiseAddr is the one place where the swap is no race.
type hook struct {
	memberlist.NodeAwareTransport
	before  func() // called once, before memberlist works
	once    sync.Once
	traffic traffic
}

// traffic counts what we send: packets and their payload bytes; 28 bytes of IPv4 and UDP headers a packet are not in it.
type traffic struct {
	packets, bytes, dials atomic.Uint64
	largest               atomic.Int64
}

// shim gives a plain transport the two methods that take node names.
type shim struct{ memberlist.Transport }

func (s shim) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return s.WriteTo(b, a.Addr)
}

func (s shim) DialAddressTimeout(a memberlist.Address, d time.Duration) (net.Conn, error) {
	return s.DialTimeout(a.Addr, d)
}

func newHook(t memberlist.Transport, before func()) *hook {
	nt, ok := t.(memberlist.NodeAwareTransport)
	if !ok {
		nt = shim{t}
	}
	return &hook{NodeAwareTransport: nt, before: before}
}

func (h *hook) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	h.once.Do(h.before)
	return h.NodeAwareTransport.FinalAdvertiseAddr(ip, port)
}

func (h *hook) count(n int) {
	h.traffic.packets.Add(1)
	h.traffic.bytes.Add(uint64(n))
	if int64(n) > h.traffic.largest.Load() {
		h.traffic.largest.Store(int64(n)) // a lost race costs a statistic
	}
}

func (h *hook) WriteTo(b []byte, addr string) (time.Time, error) {
	h.count(len(b))
	return h.NodeAwareTransport.WriteTo(b, addr)
}

func (h *hook) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	h.count(len(b))
	return h.NodeAwareTransport.WriteToAddress(b, a)
}

func (h *hook) DialTimeout(addr string, d time.Duration) (net.Conn, error) {
	h.traffic.dials.Add(1)
	return h.NodeAwareTransport.DialTimeout(addr, d)
}

func (h *hook) DialAddressTimeout(a memberlist.Address, d time.Duration) (net.Conn, error) {
	h.traffic.dials.Add(1)
	return h.NodeAwareTransport.DialAddressTimeout(a, d)
}
