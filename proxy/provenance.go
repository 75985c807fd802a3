package proxy

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
)

// Who is at the other end of a connection on the peer listener is what its certificate proves, not what a header says.

// provenBoot is the boot id that a connection's handshake proved, 0 if none.
func (p *Proxy) provenBoot(nc net.Conn) uint64 {
	if e, ok := nc.(*earlyConn); ok {
		nc = e.Conn
	}
	t, ok := nc.(*tls.Conn)
	if !ok || p.cfg.PeerBoot == nil {
		return 0
	}
	return p.cfg.PeerBoot(t.ConnectionState())
}

type provenKey struct{}

// provenContext is the ConnContext of a net/http server behind the peer listener: a connection that was handed to it with
// bytes read ahead does not show it its TLS.
func (p *Proxy) provenContext(ctx context.Context, nc net.Conn) context.Context {
	if boot := p.provenBoot(nc); boot != 0 {
		return context.WithValue(ctx, provenKey{}, boot)
	}
	return ctx
}

// provenPeer is the same for a request of such a server, or of one that knows nothing of us.
func (p *Proxy) provenPeer(r *http.Request) uint64 {
	if boot, ok := r.Context().Value(provenKey{}).(uint64); ok {
		return boot
	}
	if r.TLS != nil && p.cfg.PeerBoot != nil {
		return p.cfg.PeerBoot(*r.TLS)
	}
	return 0
}
