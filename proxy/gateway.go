package proxy

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/grapevine-lb/grapevine/routing"
)

// Gateways of the Kubernetes Gateway API Inference Extension choose the replica themselves and name it in a header. From a
// gateway that the operator trusts, the replica is the request's first choice; from everybody else the header is stripped like
// any other that would choose an upstream. It can name members only: whatever else it says is left alone, and the request is
// picked for as any other. What the named replica does not take goes elsewhere, as ever.
const (
	headerDestination = "x-gateway-destination-endpoint"        // host:port, or several in the order of preference
	headerServed      = "x-gateway-destination-endpoint-served" // on answers to such a gateway: who it was
)

// chosen is where a trusted gateway wants the request to go; ok false: it does not say, or not so that it could be followed.
func (x *exchange) chosen() (d choice, ok bool) {
	p := x.p
	if p.cfg.TrustGateway == nil || x.req.Local || p.shadow.on.Load() {
		return d, false
	}
	v := x.in.Header.Get(headerDestination)
	if v == "" || x.in.Header.Count(headerDestination) > 1 || !p.cfg.TrustGateway(x.in.Remote) {
		return d, false
	}
	for dest := range strings.SplitSeq(v, ",") {
		host, port, err := net.SplitHostPort(strings.TrimSpace(dest))
		if err != nil {
			continue
		}
		to := memberAt(p.cfg.Table.Snapshot(), host, port)
		if to == nil || to.Self() && p.draining.Load() {
			continue
		}
		x.fixed, x.gatewayPort = true, strings.Clone(port)
		return choice{Peer: to, Tokens: x.req.PromptTokens, Reason: routing.ReasonGateway}, true
	}
	p.log.Debug("a gateway names no member", "id", x.id, "destination", v)
	return d, false
}

// memberAt is the member that an address of a client listener belongs to, or nil. The member list has the addresses of the
// peer listeners: the host tells, and where several agents share one, the port, which is the one before (as by default, and
// with GRAPEVINE_PORT_BASE).
func memberAt(s *routing.Snapshot, host, port string) (found *routing.Peer) {
	n, _ := strconv.Atoi(port)
	several := false
	for _, p := range s.Peers() {
		h, peerPort, err := net.SplitHostPort(p.Member().Addr)
		if err != nil || !sameHost(h, host) {
			continue
		}
		if peerPort == strconv.Itoa(n+1) {
			return p
		}
		several = found != nil
		found = p
	}
	if several {
		return nil
	}
	return found
}

func sameHost(a, b string) bool {
	if a == b {
		return true
	}
	x, err1 := netip.ParseAddr(a)
	y, err2 := netip.ParseAddr(b)
	return err1 == nil && err2 == nil && x.Unmap() == y.Unmap()
}

// tellServed says to a trusted gateway which replica answers.
func (x *exchange) tellServed(h *Header, by *routing.Peer) {
	if x.gatewayPort == "" {
		return
	}
	if host, _, err := net.SplitHostPort(by.Member().Addr); err == nil {
		h.Set(headerServed, net.JoinHostPort(host, x.gatewayPort))
	}
}
