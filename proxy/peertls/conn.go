package peertls

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
)

// conn is a connection under TLS that is known with its key, so that it can be closed with it.
type conn struct {
	net.Conn
	owner *registry
	key   string // id of the key; empty until the handshake has proven it
	boot  uint64 // of the other side
	once  sync.Once

	accepted bool
	spoke    atomic.Bool // something came: it was no mere probe of the port
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.spoke.Load() {
		c.spoke.Store(true)
	}
	return n, err
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		if !c.owner.remove(c) && c.accepted && c.spoke.Load() && c.owner.stranger != nil {
			c.owner.stranger(c.RemoteAddr())
		}
	})
	return c.Conn.Close()
}

// NetConn is the connection below, for socket options.
func (c *conn) NetConn() net.Conn { return c.Conn }

// registry holds the open connections of an identity.
type registry struct {
	stranger func(remote net.Addr) // see OnStranger

	mu    sync.Mutex
	conns map[*conn]struct{}
}

func (r *registry) add(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns == nil {
		r.conns = make(map[*conn]struct{})
	}
	r.conns[c] = struct{}{}
}

// remove forgets c, and reports whether it had proven a key.
func (r *registry) remove(c *conn) (proven bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
	return c.key != ""
}

// OnStranger sets who is told of an accepted connection on which something came, and that ended without having proven a key
// of ours. It is to be set before the first connection.
func (id *Identity) OnStranger(f func(remote net.Addr)) { id.conns.stranger = f }

// closeIf closes the connections for which which is true.
func (r *registry) closeIf(which func(*conn) bool) {
	r.mu.Lock()
	var out []*conn
	for c := range r.conns {
		if which(c) {
			out = append(out, c)
		}
	}
	r.mu.Unlock()
	for _, c := range out {
		_ = c.Close() // both sides learn of it by their next read
	}
}

// bind notes what the handshake proved. A key that left the ring meanwhile ends the connection: either
// closeIf sees the key here, or we see the new ring.
func (id *Identity) bind(c *conn, key string, boot uint64) error {
	id.conns.mu.Lock()
	c.key, c.boot = key, boot
	id.conns.mu.Unlock()
	if id.ring.Load().byID(key) == nil {
		return ErrNoCommonKey
	}
	return nil
}

// Listener wraps the raw peer listener: what it accepts is served over TLS by ServerConfig (by the HTTP server,
// or by Server), and closed when its key leaves the ring.
func (id *Identity) Listener(raw net.Listener) net.Listener { return listener{raw, id} }

type listener struct {
	net.Listener
	id *Identity
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := l.id.track(raw)
	c.accepted = true
	return c, nil
}

func (id *Identity) track(raw net.Conn) *conn {
	c := &conn{Conn: raw, owner: &id.conns}
	id.conns.add(c)
	return c
}

// Client makes a TLS connection to the replica with this boot id over raw, handshake included. raw is closed
// on an error.
func (id *Identity) Client(ctx context.Context, raw net.Conn, boot uint64, protos ...string) (*tls.Conn, error) {
	c := id.track(raw)
	t := tls.Client(c, id.clientConfig(boot, c, protos))
	if err := t.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return t, nil
}

// Peer is what a connection's handshake proved: the id of the key that it was made under and the boot id of
// the other side (0 with own files).
func (id *Identity) Peer(cs tls.ConnectionState) (key string, boot uint64, err error) {
	if len(cs.PeerCertificates) == 0 {
		return "", 0, ErrNoCommonKey
	}
	if id.files != nil {
		return "", 0, nil
	}
	leaf := cs.PeerCertificates[0]
	boot, err = bootOf(leaf)
	for _, a := range id.ring.Load().authorities {
		if leaf.Issuer.CommonName == a.cert.Subject.CommonName {
			key = a.id
		}
	}
	return key, boot, err
}

// Open is the number of connections now known, handshakes under way included.
func (id *Identity) Open() int {
	id.conns.mu.Lock()
	defer id.conns.mu.Unlock()
	return len(id.conns.conns)
}
