package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"runtime"
	"syscall"
	"time"
)

// Limits of connections. The idle times are ours; the other side's are longer.
const (
	engineConnect = 2 * time.Second        // loopback: longer only if the engine's accept queue is full
	peerConnect   = 250 * time.Millisecond // design section 6.6
	peerHandshake = time.Second
	lateTimer     = 3 * time.Millisecond // a timer or a turn that is later than this was kept waiting for a CPU
	engineIdle    = 4 * time.Second      // uvicorn and llama.cpp close at 5 s (C35)
	peerIdle      = 60 * time.Second
)

// connector opens a connection to one place, TLS included, for an application protocol (http/1.1 or h2).
type connector func(ctx context.Context, proto string) (net.Conn, error)

// securer makes a TLS connection over one that was dialled, handshake included.
type securer func(ctx context.Context, raw net.Conn, proto string) (*tls.Conn, error)

// newEngineUpstream makes the upstream of our own engine.
func newEngineUpstream(cfg *Config) (upstream, error) {
	u := cfg.EngineURL
	network, addr := "tcp", u.Host
	switch u.Scheme {
	case "unix":
		network, addr = "unix", u.Path
	case "http", "https":
		if u.Port() == "" {
			port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
			addr = net.JoinHostPort(u.Hostname(), port)
		}
	default:
		return nil, fmt.Errorf("proxy: engine URL %q: the scheme must be http, https or unix", u.Redacted())
	}
	dial := dialer(cfg, network, addr, nil)
	reset := func(ctx context.Context) (net.Conn, error) {
		c, err := dial(ctx)
		if t, ok := c.(interface{ SetLinger(sec int) error }); ok { // TCP
			// Closing before the answer's end must be a reset: llama.cpp does not notice a plain close while it
			// works on an answer that is not streamed.
			_ = t.SetLinger(0)
		}
		return c, err
	}
	var secure securer
	if u.Scheme == "https" {
		secure = func(ctx context.Context, raw net.Conn, proto string) (*tls.Conn, error) {
			t := tls.Client(raw, &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12, NextProtos: []string{proto}})
			return t, t.HandshakeContext(ctx)
		}
	}
	return newUpstream(cfg, newConnector(reset, secure, engineConnect), "engine", secure != nil, engineIdle), nil
}

// newPeerUpstream makes the upstream of one peer's agent.
func newPeerUpstream(cfg *Config, boot uint64, addr string) upstream {
	return newUpstream(cfg, newPeerConnector(cfg, boot, addr), addr, cfg.PeerTLS != nil, peerIdle)
}

// newPeerConnector makes the connector to one peer, for requests or for the question link.
func newPeerConnector(cfg *Config, boot uint64, addr string) connector {
	var secure securer
	if cfg.PeerTLS != nil {
		secure = func(ctx context.Context, raw net.Conn, proto string) (*tls.Conn, error) {
			return cfg.PeerTLS(ctx, raw, boot, proto)
		}
	}
	return newConnector(dialer(cfg, "tcp", addr, dropWhenCut), secure, peerConnect)
}

// cutAfter is how long a peer may leave what we wrote unacknowledged: as long as keep-alive probes take.
const cutAfter = 20 * time.Second

// keepAlive is when probes find that the network is cut: within 20 s.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}

// dialer dials one address. TCP connections have TCP_NODELAY by Go's default, and keepAlive. control may set more on the socket; nil does not.
func dialer(cfg *Config, network, addr string, control func(network, address string, c syscall.RawConn) error) func(context.Context) (net.Conn, error) {
	dial := cfg.Dial
	if dial == nil {
		d := &net.Dialer{Control: control, KeepAliveConfig: keepAlive}
		dial = d.DialContext
	}
	return func(ctx context.Context) (net.Conn, error) { return dial(ctx, network, addr) }
}

// newConnector adds the limits, and TLS unless secure is nil.
//
// A limit that passes while our own goroutines wait for a CPU says nothing about the other side: then there is a
// second try with more time. Otherwise a burst on a starved agent would take healthy peers for dead.
func newConnector(dial func(context.Context) (net.Conn, error), secure securer, limit time.Duration) connector {
	try := func(ctx context.Context, proto string, limit, handshake time.Duration) (c net.Conn, late bool, err error) {
		c, late, err = within(ctx, limit, dial)
		if err != nil || secure == nil {
			return c, late, err
		}
		return within(ctx, handshake, func(ctx context.Context) (net.Conn, error) {
			t, err := secure(ctx, fastConn(c), proto)
			if err != nil {
				_ = c.Close()
				return nil, err
			}
			return t, nil
		})
	}
	return func(ctx context.Context, proto string) (net.Conn, error) {
		c, late, err := try(ctx, proto, limit, peerHandshake)
		if err == nil || ctx.Err() != nil || !timedOut(err) || !late && !starved() {
			return c, err
		}
		c, _, err = try(ctx, proto, 4*limit, 3*peerHandshake)
		return c, err
	}
}

// within runs f under a limit, and reports whether the end of the limit itself came late.
func within(ctx context.Context, limit time.Duration, f func(context.Context) (net.Conn, error)) (c net.Conn, late bool, err error) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err = f(ctx)
	return c, err != nil && time.Since(start) > limit+lateTimer, err
}

func timedOut(err error) bool {
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return true
	}
	return errors.Is(err, context.DeadlineExceeded)
}

// starved reports whether goroutines that are ready to run have to wait: it lines up a few times and looks how long
// that takes.
func starved() bool {
	start := time.Now()
	for range 3 {
		runtime.Gosched()
	}
	return time.Since(start) > lateTimer
}
