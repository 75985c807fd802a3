package gossip

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Members talk to each other at the addresses in the member list. One behind address translation joins, since it dials
// out, and then nobody reaches it: probes declare it dead, its own word brings it back, on and on. What gives it away is that
// its records come from another address than it advertises. A host with several addresses does that too, so the
// advertised one is tried before the member is refused.

const (
	strangersEvery = 100 * time.Millisecond // packets of unknown origin that are looked at, at most one each
	translateCheck = 30 * time.Second       // between two tries of one member
	translateDial  = time.Second
)

// strangers looks at packets that come from no member's address.
type strangers struct {
	mu    sync.Mutex
	next  time.Time
	tried map[uint64]time.Time // boot id → last try
}

// stranger is called by the transport for packets; it returns at once.
func (n *Node) stranger(b []byte, from netip.AddrPort) {
	ip := from.Addr().Unmap()
	if n.book.speaksFrom(ip) {
		return
	}
	now := time.Now()
	n.strangers.mu.Lock()
	skip := now.Before(n.strangers.next)
	if !skip {
		n.strangers.next = now.Add(strangersEvery)
	}
	n.strangers.mu.Unlock()
	if skip {
		return
	}
	boot, ok := n.sender(b)
	if !ok || boot == n.self.Boot {
		return
	}
	m, ok := n.book.byBoot(boot)
	if !ok {
		return
	}
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	if now.Sub(n.strangers.tried[boot]) < translateCheck {
		return
	}
	if len(n.strangers.tried) > maxParked {
		clear(n.strangers.tried)
	}
	n.strangers.tried[boot] = now
	// Never after Close began to wait: this is the transport's reader, which ends in Serf's shutdown, and until that is over
	// drain and tell are counted too.
	n.wg.Go(func() { n.checkTranslated(m, ip) })
}

// sender returns the boot id of the record in a packet (see packet for its form), if it is one that we can read.
func (n *Node) sender(b []byte) (boot uint64, ok bool) {
	label := n.cfg.Cluster
	if label != "" {
		if len(b) < 2+len(label) || b[0] != labelHeader || int(b[1]) != len(label) || string(b[2:2+len(label)]) != label {
			return 0, false
		}
		b = b[2+len(label):]
	}
	if n.ring != nil {
		if b, ok = n.ring.open(b, []byte(label)); !ok {
			return 0, false
		}
	}
	if len(b) < 2 || b[0] != userMessage || b[1] != messageType {
		return 0, false
	}
	r, err := DecodeReport(b[2:])
	return r.Boot, err == nil
}

// checkTranslated tries the advertised address of a member whose records come from elsewhere.
func (n *Node) checkTranslated(m news, from netip.Addr) {
	at, err := netip.ParseAddrPort(m.addr)
	if err != nil || at.Addr().Unmap() == from {
		return
	}
	if n.answers(m) {
		n.book.allow(m.id.Boot)
		return
	}
	n.book.refuse(m.id.Boot, fmt.Sprintf("it advertises %s, where nothing answers, and its packets come from %s: address translation is not supported; "+
		"give it an address that its peers reach (GRAPEVINE_ADVERTISE) on the same port", m.addr, from))
}

// answers reports whether a member answers at its address, by UDP or TCP.
func (n *Node) answers(m news) bool {
	if ua, err := net.ResolveUDPAddr("udp", m.addr); err == nil {
		if _, err := n.serf.Memberlist().Ping(m.name, ua); err == nil {
			return true
		}
	}
	c, err := n.hook.DialTimeout(m.addr, translateDial)
	if err != nil {
		return false
	}
	if err := c.Close(); err != nil {
		n.log.Debug("close", slog.Any(keyError, err))
	}
	return true
}

// speaksFrom reports whether an alive member has that IP address.
func (b *book) speaksFrom(ip netip.Addr) bool {
	b.ipMu.RLock()
	defer b.ipMu.RUnlock()
	return b.ips[ip] > 0
}

// byBoot finds a member by its boot id.
func (b *book) byBoot(boot uint64) (news, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, e := range b.entries {
		if e.id.Boot == boot {
			return news{entry: *e, name: name}, true
		}
	}
	return news{}, false
}

// refuse makes a member no candidate from now on, until allow.
func (b *book) refuse(boot uint64, why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refused[boot] = why
	for name, e := range b.entries {
		if e.id.Boot == boot && e.bad == "" {
			e.stock, e.bad = true, why
			b.put(name, e)
			if e.alive {
				b.tell(name, e, MemberUpdated)
			}
		}
	}
	b.publish()
}

// allow takes refuse back.
func (b *book) allow(boot uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	why, was := b.refused[boot]
	if !was {
		return
	}
	delete(b.refused, boot)
	for name, e := range b.entries {
		if e.id.Boot == boot && e.bad == why {
			e.stock, e.bad = false, ""
			b.put(name, e)
			if e.alive {
				b.tell(name, e, MemberJoined)
			}
		}
	}
	b.publish()
}
