package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// DefaultPort is the gossip port, TCP and UDP, where an address names none.
const DefaultPort = 7946

// ErrKeyRequired says that gossip would be open to the network without a key.
var ErrKeyRequired = errors.New("a gossip key is required beyond loopback")

// RequireKey returns ErrKeyRequired (with the address) if listen is reachable beyond loopback and there is neither a key
// nor the operator's word that this is wanted.
func RequireKey(listen string, keys [][]byte, insecure bool) error {
	if len(keys) > 0 || insecure {
		return nil
	}
	a, _, err := parseListen(listen)
	if err != nil {
		return err
	}
	if a.IsLoopback() {
		return nil
	}
	return fmt.Errorf("%w: gossip listens on %s", ErrKeyRequired, listen)
}

// parseListen reads host:port. An empty host is the unspecified address (all interfaces, both families), which the
// returned Addr shows by being invalid.
func parseListen(listen string) (netip.Addr, uint16, error) {
	host, ps, err := net.SplitHostPort(listen)
	if err != nil {
		return netip.Addr{}, 0, fmt.Errorf("listen address %q: want host:port or :port", listen)
	}
	port, err := strconv.ParseUint(ps, 10, 16)
	if err != nil {
		return netip.Addr{}, 0, fmt.Errorf("listen address %q: port %q is not 0 to 65535", listen, ps)
	}
	switch host {
	case "":
		return netip.Addr{}, uint16(port), nil
	case "localhost":
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port), nil
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return netip.Addr{}, 0, fmt.Errorf("listen address %q: host is not an IP address", listen)
	}
	return a.Unmap(), uint16(port), nil
}

// AdvertiseAddr decides under which IP address peers reach this agent: the given one (an IP or a host name that resolves
// to one), else the address that gossip is bound to, else that of the default route, else loopback. The error says in
// one line what is wrong with the given one. The port is always the bound one, since members talk to each other by the
// address in the member list: a translation to another port cannot work.
func AdvertiseAddr(listen, advertise string, r Resolver) (netip.Addr, error) {
	bound, port, err := parseListen(listen)
	if err != nil {
		return netip.Addr{}, err
	}
	if advertise == "" {
		if bound.IsValid() && !bound.IsUnspecified() {
			return bound, nil
		}
		return routeAddr(), nil
	}
	host := advertise
	if h, ps, err := net.SplitHostPort(advertise); err == nil {
		if p, err := strconv.ParseUint(ps, 10, 16); err != nil || (port != 0 && uint16(p) != port) {
			return netip.Addr{}, fmt.Errorf("advertise %q: the port must be that of the gossip listener, %d (address translation to another port is not supported)", advertise, port)
		}
		host = h
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		if a, err = lookupOne(host, r); err != nil {
			return netip.Addr{}, fmt.Errorf("advertise %q: %w", advertise, err)
		}
	}
	a = a.Unmap()
	switch {
	case a.IsUnspecified():
		return netip.Addr{}, fmt.Errorf("advertise %q: no peer can reach the unspecified address; give the address that peers use, such as the pod IP", advertise)
	case a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return netip.Addr{}, fmt.Errorf("advertise %q: not the address of one host", advertise)
	case a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("advertise %q: a link-local address with a zone means nothing to peers", advertise)
	case bound.IsValid() && bound.IsLoopback() && !a.IsLoopback():
		return netip.Addr{}, fmt.Errorf("advertise %q: gossip listens on loopback only (%s)", advertise, listen)
	case bound.IsValid() && bound.Is4() && a.Is6(), bound.IsValid() && !bound.IsUnspecified() && bound.Is6() && a.Is4():
		return netip.Addr{}, fmt.Errorf("advertise %q: gossip listens on the other address family (%s)", advertise, listen)
	}
	return a, nil
}

func lookupOne(host string, r Resolver) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	as, err := r.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("neither an IP address nor a name that resolves: %w", err)
	}
	for _, a := range as { // IPv4 first, as most pod networks have it
		if a.Unmap().Is4() {
			return a.Unmap(), nil
		}
	}
	if len(as) == 0 {
		return netip.Addr{}, errors.New("the name resolves to no address")
	}
	return as[0], nil
}

// routeAddr returns the source address of the default route (IPv4, then IPv6), or loopback without one. Connecting a
// UDP socket asks the kernel for the route; no packet is sent.
func routeAddr() netip.Addr {
	for _, to := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		c, err := net.Dial("udp", to)
		if err != nil {
			continue
		}
		ap := c.LocalAddr().(*net.UDPAddr).AddrPort()
		_ = c.Close()
		if a := ap.Addr().Unmap(); a.IsValid() && !a.IsUnspecified() {
			return a
		}
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// isLocal reports whether a is an address of an interface of this host. If the host does not say, it is taken as one.
func isLocal(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	as, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, x := range as {
		if p, err := netip.ParsePrefix(x.String()); err == nil && p.Addr().Unmap() == a {
			return true
		}
	}
	return false
}
