package peertls

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	keyA = bytes.Repeat([]byte("a"), 32)
	keyB = bytes.Repeat([]byte("b"), 32)
	keyC = bytes.Repeat([]byte("c"), 16)
)

const (
	bootServer = 0xfedcba9876543210
	bootClient = 0x1111
)

func identity(t *testing.T, boot uint64, keys ...[]byte) *Identity {
	t.Helper()
	id, err := New(boot, keys)
	require.NoError(t, err)
	return id
}

// echo is a peer that answers each byte with itself until its connection ends.
type echo struct {
	*Identity
	addr string
	left atomic.Uint64
	errs chan error // of handshakes that failed
}

func serve(t *testing.T, id *Identity) *echo {
	t.Helper()
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	e := &echo{Identity: id, addr: raw.Addr().String(), errs: make(chan error, 100)}
	ln := tls.NewListener(id.Listener(raw), id.ServerConfig(func(b uint64) bool { return b == e.left.Load() }))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				if err := c.(*tls.Conn).Handshake(); err != nil {
					e.errs <- err
					return
				}
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	return e
}

// dial connects and proves that bytes flow both ways, since a listener's refusal shows at the first read only.
func (e *echo) dial(t *testing.T, id *Identity, boot uint64) (*tls.Conn, error) {
	t.Helper()
	raw, err := net.Dial("tcp", e.addr)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := id.Client(ctx, raw, boot)
	if err != nil {
		return nil, err
	}
	if err := roundTrip(c); err != nil {
		_ = c.Close()
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, nil
}

func roundTrip(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	// Beside the read: over a pipe without a buffer the listener's session ticket must be taken first.
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write([]byte("x"))
		wrote <- err
	}()
	_, err := io.ReadFull(c, make([]byte, 1))
	return errors.Join(err, <-wrote)
}

func TestTwoMembers(t *testing.T) {
	s, id := serve(t, identity(t, bootServer, keyA)), identity(t, bootClient, keyA)
	c, err := s.dial(t, id, bootServer)
	require.NoError(t, err)
	key, boot, err := id.Peer(c.ConnectionState())
	require.NoError(t, err)
	want, _ := KeyID(keyA)
	assert.Equal(t, want, key)
	assert.EqualValues(t, uint64(bootServer), boot)
	assert.Equal(t, uint16(tls.VersionTLS13), c.ConnectionState().Version)
	assert.Equal(t, 1, id.Open())
	require.NoError(t, c.Close())
	assert.Zero(t, id.Open())
	assert.Eventually(t, func() bool { return s.Open() == 0 }, 5*time.Second, time.Millisecond, "the listener forgets closed connections")
}

func TestSessionsAreReusedAndKeptApartByBoot(t *testing.T) {
	s, id := serve(t, identity(t, bootServer, keyA)), identity(t, bootClient, keyA)
	for i := range 3 {
		c, err := s.dial(t, id, bootServer)
		require.NoError(t, err)
		assert.Equal(t, i > 0, c.ConnectionState().DidResume, i)
		_, boot, err := id.Peer(c.ConnectionState())
		require.NoError(t, err)
		assert.EqualValues(t, uint64(bootServer), boot)
		_ = c.Close()
	}
	other := serve(t, identity(t, 77, keyA))
	c, err := other.dial(t, id, 77)
	require.NoError(t, err)
	assert.False(t, c.ConnectionState().DidResume)
}

// Rotation as operators do it: every step with all overlaps, at either side first.
func TestRotation(t *testing.T) {
	for _, c := range []struct {
		name           string
		server, client [][]byte
		want           []byte // nil = no common key
	}{
		{"old", [][]byte{keyA}, [][]byte{keyA}, keyA},
		{"new at the server, for reading", [][]byte{keyA, keyB}, [][]byte{keyA}, keyA},
		{"new first at the server", [][]byte{keyB, keyA}, [][]byte{keyA}, keyA},
		{"new first at the client", [][]byte{keyA}, [][]byte{keyB, keyA}, keyA},
		{"new at both", [][]byte{keyB, keyA}, [][]byte{keyB, keyA}, keyB},
		{"orders differ: the listener's newest", [][]byte{keyB, keyA}, [][]byte{keyA, keyB}, keyB},
		{"old removed at the server", [][]byte{keyB}, [][]byte{keyB, keyA}, keyB},
		{"old removed at the client", [][]byte{keyB, keyA}, [][]byte{keyB}, keyB},
		{"one in the middle", [][]byte{keyC, keyB}, [][]byte{keyB, keyA}, keyB},
		{"none", [][]byte{keyC, keyB}, [][]byte{keyA}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, id := serve(t, identity(t, bootServer, c.server...)), identity(t, bootClient, c.client...)
			conn, err := s.dial(t, id, bootServer)
			if c.want == nil {
				require.ErrorIs(t, err, ErrNoCommonKey)
				assert.EqualValues(t, 1, s.Mismatches())
				return
			}
			require.NoError(t, err)
			key, _, err := id.Peer(conn.ConnectionState())
			require.NoError(t, err)
			want, _ := KeyID(c.want)
			assert.Equal(t, want, key)
			assert.Zero(t, s.Mismatches())
		})
	}
}

func TestRemovingAKeyClosesItsConnections(t *testing.T) {
	for _, side := range []string{"listener", "dialler"} {
		t.Run(side, func(t *testing.T) {
			sid, id := identity(t, bootServer, keyA), identity(t, bootClient, keyA)
			s := serve(t, sid)
			old, err := s.dial(t, id, bootServer)
			require.NoError(t, err)
			for _, i := range []*Identity{sid, id} {
				require.NoError(t, i.SetKeys([][]byte{keyB, keyA}))
			}
			require.NoError(t, roundTrip(old), "adding a key disturbs nothing")
			young, err := s.dial(t, id, bootServer)
			require.NoError(t, err)
			require.False(t, young.ConnectionState().DidResume, "a session under the old key is not taken up under the new")

			remover := map[string]*Identity{"listener": sid, "dialler": id}[side]
			require.NoError(t, remover.SetKeys([][]byte{keyB}))
			require.Error(t, roundTrip(old))
			require.NoError(t, roundTrip(young), "the connection under the key that stays goes on")
			again, err := s.dial(t, id, bootServer)
			require.NoError(t, err)
			key, _, _ := id.Peer(again.ConnectionState())
			want, _ := KeyID(keyB)
			assert.Equal(t, want, key)
		})
	}
}

// C82: the steps of a rotation, each agent at its own time, cost no handshake and no connection under the new key.
func TestRotationLosesNothing(t *testing.T) {
	sid, id := identity(t, bootServer, keyA), identity(t, bootClient, keyA)
	s := serve(t, sid)
	stop := make(chan struct{})
	failed := make(chan error, 1)
	var dials atomic.Int64
	go func() {
		defer close(failed)
		for {
			select {
			case <-stop:
				return
			default:
			}
			raw, err := net.Dial("tcp", s.addr)
			if err == nil {
				var c *tls.Conn
				if c, err = id.Client(context.Background(), raw, bootServer); err == nil {
					err = roundTrip(c)
					_ = c.Close()
				}
			}
			if err != nil {
				failed <- err
				return
			}
			dials.Add(1)
		}
	}()
	for range 3 {
		for _, step := range []struct {
			who  *Identity
			keys [][]byte
		}{
			{sid, [][]byte{keyA, keyB}}, {id, [][]byte{keyA, keyB}}, // for reading
			{id, [][]byte{keyB, keyA}}, {sid, [][]byte{keyB, keyA}}, // for sending
			{sid, [][]byte{keyB}}, {id, [][]byte{keyB}}, // the old one goes
			{id, [][]byte{keyB, keyA}}, {sid, [][]byte{keyB, keyA}}, // and back
			{sid, [][]byte{keyA, keyB}}, {id, [][]byte{keyA, keyB}}, {id, [][]byte{keyA}}, {sid, [][]byte{keyA}},
		} {
			require.NoError(t, step.who.SetKeys(step.keys))
			// What began under the ring of before has ended when the second of two more has.
			for seen := dials.Load(); dials.Load() < seen+2 && len(failed) == 0; {
				time.Sleep(time.Millisecond)
			}
		}
	}
	close(stop)
	require.NoError(t, <-failed)
	assert.GreaterOrEqual(t, dials.Load(), int64(2*3*12))
}

// A stolen session of a removed key opens nothing: the listener offers a full handshake, which fails.
func TestSessionOfARemovedKeyIsWorthNothing(t *testing.T) {
	sid, id := identity(t, bootServer, keyA, keyB), identity(t, bootClient, keyA)
	s := serve(t, sid)
	_, err := s.dial(t, id, bootServer)
	require.NoError(t, err)
	require.NoError(t, sid.SetKeys([][]byte{keyB}))
	_, err = s.dial(t, id, bootServer) // id still holds the session and knows no other key
	require.ErrorIs(t, err, ErrNoCommonKey)
}

func TestWrongBoot(t *testing.T) {
	s, id := serve(t, identity(t, bootServer, keyA)), identity(t, bootClient, keyA)
	_, err := s.dial(t, id, 42)
	require.ErrorIs(t, err, ErrWrongBoot)
	assert.Contains(t, err.Error(), "fedcba9876543210")
	assert.Zero(t, id.Open())
}

func TestLeftMember(t *testing.T) {
	s, id := serve(t, identity(t, bootServer, keyA)), identity(t, bootClient, keyA)
	c, err := s.dial(t, id, bootServer)
	require.NoError(t, err)
	s.left.Store(bootClient)
	_, err = s.dial(t, id, bootServer)
	require.Error(t, err, "not even with a session")
	require.ErrorIs(t, <-s.errs, ErrLeft)
	require.NoError(t, roundTrip(c), "what is open stays open")
	s.Drop(bootClient)
	require.Error(t, roundTrip(c))
	_, err = s.dial(t, identity(t, 5, keyA), bootServer)
	require.NoError(t, err, "unknown members with a valid leaf are welcome")
}

// A stranger with another key that claims ours: no reply to anything, whichever side it is on.
func TestStranger(t *testing.T) {
	s := serve(t, identity(t, bootServer, keyA))
	stranger := identity(t, bootClient, keyB)
	_, err := s.dial(t, stranger, bootServer)
	require.ErrorIs(t, err, ErrNoCommonKey)

	// It knows the public id of our key and copies the authority's name, but can not sign with it.
	ours, err := newAuthority(keyA, bootClient, stranger.leafKey)
	require.NoError(t, err)
	theirs := stranger.ring.Load().authorities[0]
	forged := *theirs
	forged.id, forged.cert = ours.id, ours.cert
	r := &ring{authorities: []*authority{&forged}, serverName: ours.id + nameSuffix, sessions: tls.NewLRUClientSessionCache(1)}
	stranger.ring.Store(r)
	raw, err := net.Dial("tcp", s.addr)
	require.NoError(t, err)
	cfg := stranger.ClientConfig(bootServer)
	cfg.VerifyConnection = nil
	c := tls.Client(raw, cfg)
	_ = c.Handshake()
	require.Error(t, roundTrip(c))
	_ = c.Close()
	require.Error(t, <-s.errs)
	require.Error(t, <-s.errs)

	// No certificate at all.
	raw, err = net.Dial("tcp", s.addr)
	require.NoError(t, err)
	c = tls.Client(raw, &tls.Config{InsecureSkipVerify: true, ServerName: ours.id + nameSuffix})
	_ = c.Handshake()
	require.Error(t, roundTrip(c))
	_ = c.Close()

	// Plain text.
	raw, err = net.Dial("tcp", s.addr)
	require.NoError(t, err)
	_, _ = raw.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	b, _ := io.ReadAll(raw)
	assert.NotContains(t, string(b), "x-grapevine")
	_ = raw.Close()
}

func TestKeysAreDerivedAlikeAndTellNothing(t *testing.T) {
	a, b := identity(t, 1, keyA), identity(t, 2, keyA)
	x, y := a.ring.Load().authorities[0], b.ring.Load().authorities[0]
	assert.Equal(t, x.cert.Raw, y.cert.Raw, "every agent derives the same authority")
	assert.NotEqual(t, x.leaf.Certificate, y.leaf.Certificate)
	assert.Len(t, x.id, 16)
	assert.NotContains(t, string(x.cert.Raw), string(keyA))
	assert.Equal(t, []string{x.id}, a.KeyIDs())

	_, err := New(1, nil)
	require.Error(t, err)
	_, err = New(1, [][]byte{[]byte("short")})
	require.Error(t, err)
	before := a.KeyIDs()
	require.Error(t, a.SetKeys([][]byte{keyB, []byte("short")}))
	assert.Equal(t, before, a.KeyIDs(), "a bad ring changes nothing")
	require.NoError(t, a.SetKeys([][]byte{keyB, keyB}))
	assert.Len(t, a.KeyIDs(), 1)
}

// Clocks play no part: one side in 2000, a handshake over a pipe in a bubble whose clock is set apart by years.
func TestClockSkew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := identity(t, bootServer, keyA) // issued in the bubble's year 2000
		time.Sleep(40 * 365 * 24 * time.Hour)
		c := identity(t, bootClient, keyA) // issued forty years later
		for range 2 {
			x, y := net.Pipe()
			done := make(chan error, 1)
			go func() {
				t := tls.Server(y, s.ServerConfig(nil))
				_, err := io.Copy(t, t)
				done <- errors.Join(err, t.Close())
			}()
			conn, err := c.Client(t.Context(), x, bootServer)
			require.NoError(t, err)
			require.NoError(t, roundTrip(conn))
			_ = conn.Close()
			<-done
			time.Sleep(60 * 365 * 24 * time.Hour)
		}
	})
	// A clock before every certificate, as on a board without one.
	s, c := identity(t, bootServer, keyA), identity(t, bootClient, keyA)
	x, y := net.Pipe()
	cfg := s.ServerConfig(nil)
	cfg.Time = func() time.Time { return time.Unix(0, 0) }
	go func() {
		t := tls.Server(y, cfg)
		_, _ = io.Copy(t, t)
		_ = t.Close()
	}()
	conn, err := c.Client(t.Context(), x, bootServer)
	require.NoError(t, err)
	require.NoError(t, roundTrip(conn))
	_ = conn.Close()
}

func TestHTTPServerAndTransport(t *testing.T) {
	sid, id := identity(t, bootServer, keyA), identity(t, bootClient, keyA)
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, boot, err := sid.Peer(*r.TLS)
		if err != nil || boot != bootClient {
			w.WriteHeader(500)
		}
		_, _ = io.WriteString(w, r.Proto)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(tls.NewListener(sid.Listener(raw), sid.ServerConfig(nil, "h2", "http/1.1")))
	}()
	tr := &http.Transport{ForceAttemptHTTP2: true, DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return id.Client(ctx, c, bootServer, "h2")
	}}
	resp, err := (&http.Client{Transport: tr}).Get("https://" + raw.Addr().String() + "/")
	require.NoError(t, err)
	b, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	assert.Equal(t, 200, resp.StatusCode)
	assert.Equal(t, "HTTP/2.0", string(b))
	tr.CloseIdleConnections()
	_ = srv.Close()
	<-done
}

func TestManyKeysStillNameTheNewest(t *testing.T) {
	var keys [][]byte
	for i := range 40 {
		keys = append(keys, bytes.Repeat([]byte{byte(i)}, 16))
	}
	s, id := serve(t, identity(t, bootServer, keys[5])), identity(t, bootClient, keys...)
	_, err := s.dial(t, id, bootServer)
	require.NoError(t, err)
	assert.LessOrEqual(t, len(id.ring.Load().serverName), 253)
}

func BenchmarkHandshake(b *testing.B) {
	for _, resume := range []bool{false, true} {
		b.Run(map[bool]string{false: "full", true: "resumed"}[resume], func(b *testing.B) {
			s, err := New(bootServer, [][]byte{keyA})
			require.NoError(b, err)
			c, err := New(bootClient, [][]byte{keyA})
			require.NoError(b, err)
			// Real sockets: a resumed handshake has both sides write at once, which net.Pipe can not do.
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(b, err)
			defer func() { _ = ln.Close() }()
			cfg := s.ServerConfig(nil)
			go func() {
				for {
					y, err := ln.Accept()
					if err != nil {
						return
					}
					go func() {
						t := tls.Server(y, cfg)
						_, _ = io.Copy(t, t)
						_ = t.Close()
					}()
				}
			}()
			for b.Loop() {
				x, err := net.Dial("tcp", ln.Addr().String())
				require.NoError(b, err)
				if !resume {
					_ = c.SetKeys([][]byte{keyA})
				}
				t, err := c.Client(b.Context(), x, bootServer)
				require.NoError(b, err)
				require.NoError(b, roundTrip(t))
				_ = t.Close()
			}
		})
	}
}
