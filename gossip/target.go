package gossip

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// checkTarget says why the peer address of a member that gossips from ip must not be dialled, or nil. Prompts go there, so
// a member may name no host but itself: whoever holds the key could else point all agents at a metadata service, at a port
// of their own loopback, or at another pod. Only the port is its choice.
func (n *Node) checkTarget(id identity, ip net.IP) error {
	host, port, err := net.SplitHostPort(id.Addr)
	if err != nil {
		return fmt.Errorf("peer address %q is none", id.Addr)
	}
	// Compared as text with our own below, so it has one spelling only.
	if p, err := strconv.ParseUint(port, 10, 16); err != nil || p == 0 || strconv.FormatUint(p, 10) != port {
		return fmt.Errorf("peer address %q has no port number", id.Addr)
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return fmt.Errorf("peer address %q is no IP address", id.Addr)
	}
	from, _ := netip.AddrFromSlice(ip)
	a, from = a.Unmap(), from.Unmap()
	switch {
	case a.IsUnspecified() || a.IsMulticast() || a.Zone() != "":
		return fmt.Errorf("peer address %s is not that of one host", id.Addr)
	case a.IsLinkLocalUnicast():
		return fmt.Errorf("peer address %s is link-local", id.Addr)
	case a.IsLoopback() && !n.onLoopback():
		return fmt.Errorf("peer address %s is loopback, and this agent is not", id.Addr)
	case a != from && !(a.IsLoopback() && from.IsLoopback()):
		return fmt.Errorf("peer address %s differs from the gossip address %s; bind both listeners to the same address", id.Addr, from)
	case n.isOwnAddr(a, port) && id.pod != n.id.pod: // our own former life is known by its name
		return fmt.Errorf("peer address %s is this agent's own", id.Addr)
	}
	return nil
}

// onLoopback reports whether peers reach this agent by a loopback address, as in tests and on one host.
func (n *Node) onLoopback() bool {
	a, err := netip.ParseAddrPort(n.addr)
	return err == nil && a.Addr().Unmap().IsLoopback()
}

// isOwnAddr reports whether a connection to that address would end at our own peer listener.
func (n *Node) isOwnAddr(a netip.Addr, port string) bool {
	host, own, err := net.SplitHostPort(n.self.Addr)
	if err != nil || own != port {
		return false
	}
	bound, err := netip.ParseAddr(host)
	if host == "" || err == nil && bound.IsUnspecified() {
		g, err := netip.ParseAddrPort(n.addr)
		return err == nil && g.Addr().Unmap() == a || n.cfg.Transport == nil && isLocal(a)
	}
	return err == nil && bound.Unmap() == a
}

// refusedEvery is the least time between two lines about refused members.
const refusedEvery = 10 * time.Second

// refuseMember counts, and says now and then, that a member is no candidate because of its address. tell calls it.
func (n *Node) refuseMember(m news) {
	n.stats.refused.Add(1)
	now := time.Now()
	if now.Sub(n.refusedAt) < refusedEvery && !n.refusedAt.IsZero() {
		n.refusedQuiet++
		return
	}
	n.log.Warn("member gets no requests", slog.String(keyMember, m.name), slog.String("reason", m.bad), slog.Int(keySuppressed, n.refusedQuiet))
	n.refusedAt, n.refusedQuiet = now, 0
	if n.cfg.OnRefused != nil {
		n.cfg.OnRefused(m.name, m.bad)
	}
}
