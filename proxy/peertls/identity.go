package peertls

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Why a handshake ended. A refused dialler sees only an alert of the other side.
var (
	ErrNoCommonKey = errors.New("peer has none of our keys")
	ErrWrongBoot   = errors.New("peer is not the replica that was meant")
	ErrLeft        = errors.New("peer has left the cluster")
)

// Identity is this agent's proof of membership.
type Identity struct {
	boot    uint64
	leafKey ed25519.PrivateKey
	files   *files // nil without own files

	mu    sync.Mutex // SetKeys and reload, one at a time
	ring  atomic.Pointer[ring]
	conns registry

	mismatches atomic.Uint64
}

// ring is one state of the keys, never changed.
type ring struct {
	authorities []*authority // newest first
	serverName  string       // ids of the keys, sent by diallers
	sessions    tls.ClientSessionCache
}

// At most this many keys are named in a handshake: a server name has room for 253 bytes.
const maxKeys = 12

const nameSuffix = ".grapevine"

// New makes the identity of the process with this boot id from the gossip keys, newest first, at least one.
func New(boot uint64, keys [][]byte) (*Identity, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("peer identity: %w", err)
	}
	id := &Identity{boot: boot, leafKey: key}
	if err := id.SetKeys(keys); err != nil {
		return nil, err
	}
	return id, nil
}

// SetKeys replaces the ring, newest key first. Connections made under a key that is not in it any more are
// closed. On an error nothing has changed. It does nothing to an identity made from files.
func (id *Identity) SetKeys(keys [][]byte) error {
	if id.files != nil {
		return nil
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	if len(keys) == 0 {
		return errors.New("peer identity: no key")
	}
	var next []*authority
	for _, k := range keys {
		name, err := KeyID(k)
		if err != nil {
			return fmt.Errorf("peer identity: %w", err)
		}
		if slices.ContainsFunc(next, func(a *authority) bool { return a.id == name }) {
			continue
		}
		a := id.authority(name)
		if a == nil {
			if a, err = newAuthority(k, id.boot, id.leafKey); err != nil {
				return fmt.Errorf("peer identity: %w", err)
			}
		}
		next = append(next, a)
	}
	id.setRing(next)
	return nil
}

func (id *Identity) setRing(next []*authority) {
	r := &ring{authorities: next, sessions: tls.NewLRUClientSessionCache(1024)}
	var names []string
	for _, a := range next[:min(len(next), maxKeys)] {
		names = append(names, a.id)
	}
	r.serverName = strings.Join(names, ".") + nameSuffix
	id.ring.Store(r)
	id.conns.closeIf(func(c *conn) bool { return c.key != "" && r.byID(c.key) == nil })
}

// KeyIDs lists the ids of the keys, newest first.
func (id *Identity) KeyIDs() []string {
	var out []string
	for _, a := range id.ring.Load().authorities {
		out = append(out, a.id)
	}
	return out
}

// Mismatches counts handshakes in which a dialler had none of our keys.
func (id *Identity) Mismatches() uint64 { return id.mismatches.Load() }

// Drop closes the connections with the replica of this boot id, after it left.
func (id *Identity) Drop(boot uint64) {
	id.conns.closeIf(func(c *conn) bool { return c.key != "" && c.boot == boot })
}

func (id *Identity) authority(name string) *authority {
	if r := id.ring.Load(); r != nil {
		return r.byID(name)
	}
	return nil
}

func (r *ring) byID(name string) *authority {
	for _, a := range r.authorities {
		if a.id == name {
			return a
		}
	}
	return nil
}

// common is the newest of our keys that is among the ids in a server name.
func (r *ring) common(serverName string) *authority {
	ids := strings.Split(strings.TrimSuffix(serverName, nameSuffix), ".")
	for _, a := range r.authorities {
		if slices.Contains(ids, a.id) {
			return a
		}
	}
	return nil
}

// ServerConfig is for the peer listener. left tells which boot ids have left the cluster; nil = none. protos
// are the ALPN names, if any. The result must not be changed. Key changes reach it.
func (id *Identity) ServerConfig(left func(boot uint64) bool, protos ...string) *tls.Config {
	base := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: protos}
	base.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		r := id.current()
		a := r.authorities[0]
		if id.files == nil {
			if a = r.common(hello.ServerName); a == nil {
				id.mismatches.Add(1)
				// Going on with our newest key lets the dialler see whose fault it is; it will not get past it.
				a = r.authorities[0]
			}
		}
		pool := a.pool
		cfg := &tls.Config{
			MinVersion:   tls.VersionTLS13,
			NextProtos:   protos,
			Certificates: []tls.Certificate{a.leaf},
			ClientAuth:   tls.RequireAnyClientCert, // verified below, without a clock
			ClientCAs:    pool,
			VerifyConnection: func(cs tls.ConnectionState) error {
				key, boot, err := id.verify(cs, x509.ExtKeyUsageClientAuth)
				if err != nil {
					return err
				}
				if left != nil && boot != 0 && left(boot) {
					return ErrLeft
				}
				if c, ok := hello.Conn.(*conn); ok {
					return id.bind(c, key, boot)
				}
				return nil
			},
			// A ticket is good only under the key that a full handshake would choose now.
			WrapSession: func(cs tls.ConnectionState, s *tls.SessionState) ([]byte, error) {
				s.Extra = append(s.Extra, []byte(a.id))
				return base.EncryptTicket(cs, s)
			},
			UnwrapSession: func(ticket []byte, cs tls.ConnectionState) (*tls.SessionState, error) {
				s, err := base.DecryptTicket(ticket, cs)
				if err != nil || s == nil || len(s.Extra) == 0 || string(s.Extra[len(s.Extra)-1]) != a.id {
					return nil, nil //nolint:nilerr // a ticket that is not taken means a full handshake
				}
				return s, nil
			},
		}
		return cfg, nil
	}
	return base
}

// ClientConfig is for dialling the replica with this boot id. protos are the ALPN names, if any. It holds for
// the ring of this moment: take a new one for each connection.
func (id *Identity) ClientConfig(boot uint64, protos ...string) *tls.Config {
	return id.clientConfig(boot, nil, protos)
}

func (id *Identity) clientConfig(want uint64, track *conn, protos []string) *tls.Config {
	r := id.current()
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         protos,
		ServerName:         r.serverName,
		InsecureSkipVerify: true, // verified below, by boot id and without a clock
		ClientSessionCache: bootSessions{r.sessions, bootName(want)},
		GetClientCertificate: func(cri *tls.CertificateRequestInfo) (*tls.Certificate, error) {
			for _, a := range r.authorities {
				if id.files != nil || slices.ContainsFunc(cri.AcceptableCAs, func(raw []byte) bool { return bytes.Equal(raw, a.cert.RawSubject) }) {
					return &a.leaf, nil
				}
			}
			return nil, ErrNoCommonKey
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			key, boot, err := id.verify(cs, x509.ExtKeyUsageServerAuth)
			if err != nil {
				return err
			}
			if boot != want && id.files == nil {
				return fmt.Errorf("%w: wanted %s, got %s", ErrWrongBoot, bootName(want), bootName(boot))
			}
			if track != nil {
				return id.bind(track, key, want)
			}
			return nil
		},
	}
}

// current is the ring to use now. Own files are looked at again at times.
func (id *Identity) current() *ring {
	if id.files != nil {
		id.reload()
	}
	return id.ring.Load()
}

// verify checks the other side's leaf against the present ring, also for resumed sessions, and tells the key
// and the boot id (0 with own files).
func (id *Identity) verify(cs tls.ConnectionState, usage x509.ExtKeyUsage) (key string, boot uint64, err error) {
	if len(cs.PeerCertificates) == 0 {
		return "", 0, errors.New("peer showed no certificate")
	}
	leaf := cs.PeerCertificates[0]
	if id.files != nil {
		return id.files.verify(id.ring.Load(), cs.PeerCertificates, usage)
	}
	for _, a := range id.ring.Load().authorities {
		if !bytes.Equal(leaf.RawIssuer, a.cert.RawSubject) {
			continue
		}
		_, err := leaf.Verify(x509.VerifyOptions{Roots: a.pool, CurrentTime: judgedAt, KeyUsages: []x509.ExtKeyUsage{usage}})
		if err != nil {
			return "", 0, err
		}
		boot, err := bootOf(leaf)
		return a.id, boot, err
	}
	return "", 0, ErrNoCommonKey
}

// bootSessions keeps the sessions of one replica apart: all share a server name.
type bootSessions struct {
	tls.ClientSessionCache
	boot string
}

func (s bootSessions) Get(key string) (*tls.ClientSessionState, bool) {
	return s.ClientSessionCache.Get(s.boot + " " + key)
}

func (s bootSessions) Put(key string, cs *tls.ClientSessionState) {
	s.ClientSessionCache.Put(s.boot+" "+key, cs)
}
