package proxy

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"time"
)

const (
	engineConnect = 2 * time.Second        // loopback: longer only if the engine's accept queue is full
	peerConnect   = 250 * time.Millisecond // design section 6.6
	peerHandshake = time.Second
	engineIdle    = 4 * time.Second // uvicorn and llama.cpp close at 5 s (C35)
	peerIdle      = 60 * time.Second
	maxHead       = 256 << 10 // bytes of an answer's head
)

// netUpstream sends requests through net/http: HTTP/1.1, or HTTP/2 where the request needs it (gRPC).
type netUpstream struct {
	scheme, host string
	h1, h2       *http.Transport
}

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
	dial := dialer(cfg.Dial, engineConnect)
	var secure securer
	if u.Scheme == "https" {
		secure = tlsClient(func() *tls.Config { return &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12} })
	}
	up := newUpstream(cfg, func(ctx context.Context) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if t, ok := c.(*net.TCPConn); ok {
			// Closing before the answer's end must be a reset: llama.cpp does not notice a plain close while it
			// works on an answer that is not streamed.
			_ = t.SetLinger(0)
		}
		return c, err
	}, "engine", secure, engineIdle)
	return up, nil
}

// newPeerUpstream makes the upstream of one peer's agent.
func newPeerUpstream(cfg *Config, boot uint64, addr string) upstream {
	dial := dialer(cfg.Dial, peerConnect)
	var secure securer
	if cfg.PeerTLS != nil {
		secure = tlsClient(func() *tls.Config { return cfg.PeerTLS(boot) })
	}
	return newUpstream(cfg, func(ctx context.Context) (net.Conn, error) { return dial(ctx, "tcp", addr) }, addr, secure, peerIdle)
}

// securer makes a TLS connection of a plain one, for the given application protocol; raw is closed on an error.
type securer func(ctx context.Context, raw net.Conn, proto string) (net.Conn, error)

// tlsClient asks for the configuration at each connection, since keys change while links live.
func tlsClient(config func() *tls.Config) securer {
	return func(ctx context.Context, raw net.Conn, proto string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, peerHandshake)
		defer cancel()
		c := config().Clone()
		c.NextProtos = []string{proto}
		t := tls.Client(raw, c)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, err
		}
		return t, nil
	}
}

// dialer applies the connect timeout. TCP connections have TCP_NODELAY by Go's default, and keep-alive probes that
// find a cut network within 20 s.
func dialer(custom func(context.Context, string, string) (net.Conn, error), timeout time.Duration) func(context.Context, string, string) (net.Conn, error) {
	if custom == nil {
		d := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}}
		custom = d.DialContext
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return custom(ctx, network, addr)
	}
}

func newNetUpstream(dial func(context.Context) (net.Conn, error), host string, secure securer, idle time.Duration) *netUpstream {
	u := &netUpstream{scheme: "http", host: host}
	if secure != nil {
		u.scheme = "https"
	}
	make1 := func(h2 bool) *http.Transport {
		var ps http.Protocols
		switch {
		case !h2:
			ps.SetHTTP1(true)
		case secure != nil:
			ps.SetHTTP2(true)
		default:
			ps.SetUnencryptedHTTP2(true)
		}
		t := &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableCompression:     true, // the engine sees what the client asked for (C09)
			MaxIdleConns:           0,
			MaxIdleConnsPerHost:    4096,
			IdleConnTimeout:        idle,
			MaxResponseHeaderBytes: maxHead,
			Protocols:              &ps,
		}
		if secure != nil {
			proto := "http/1.1"
			if h2 {
				proto = "h2"
			}
			t.DialTLSContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
				raw, err := dial(ctx)
				if err != nil {
					return nil, err
				}
				return secure(ctx, raw, proto)
			}
		}
		return t
	}
	u.h1, u.h2 = make1(false), make1(true)
	return u
}

// close ends the idle connections.
func (u *netUpstream) close() {
	u.h1.CloseIdleConnections()
	u.h2.CloseIdleConnections()
}

// trace is what httptrace tells about one try. All is written before RoundTrip returns, or never read.
type trace struct {
	got, reused, replied bool
}

// Send implements Upstream.
func (u *netUpstream) Send(ctx context.Context, r *Outgoing) (*Answer, error) {
	target, err := url.ParseRequestURI(r.Target)
	if err != nil {
		closeBody(r)
		return nil, &SendError{Stage: StageDial, Err: err}
	}
	target.Scheme, target.Host = u.scheme, u.host
	var tr traceBox
	req := (&http.Request{
		Method: r.Method, URL: target, Host: r.Host, Header: toNetHeader(r.Header), ContentLength: r.Length,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}).WithContext(httptrace.WithClientTrace(ctx, tr.client()))
	if r.Body != nil {
		req.Body = r.Body
		if r.Reopen != nil {
			req.GetBody = func() (io.ReadCloser, error) { return r.Reopen(), nil }
		}
	}
	if r.Upgrade != "" {
		req.Header["Connection"] = []string{"Upgrade"}
		req.Header["Upgrade"] = []string{r.Upgrade}
	}
	if _, ok := req.Header["User-Agent"]; !ok {
		req.Header["User-Agent"] = nil // none was sent, none is invented
	}
	t := u.h1
	if r.HTTP2 {
		t = u.h2
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		got := tr.get()
		e := &SendError{Stage: StageDial, Reused: got.reused, Err: err}
		switch {
		case got.replied:
			e.Stage = StageHead
		case got.got:
			e.Stage = StageNoReply
		}
		return nil, e
	}
	a := &Answer{
		Head: ResponseHead{Status: resp.StatusCode, Header: fromNetHeader(resp.Header), Length: resp.ContentLength},
		Body: resp.Body,
		Trailer: func() Header {
			if len(resp.Trailer) == 0 {
				return nil
			}
			return fromNetHeader(resp.Trailer)
		},
	}
	for name := range resp.Trailer {
		a.Head.Trailer = append(a.Head.Trailer, name)
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		rw, ok := resp.Body.(io.ReadWriteCloser)
		if !ok {
			_ = resp.Body.Close()
			return nil, &SendError{Stage: StageHead, Err: fmt.Errorf("101 without a connection")}
		}
		a.Tunnel, a.Body = rw, nil
	}
	return a, nil
}

// sweep does nothing: the transport has timers of its own.
func (u *netUpstream) sweep(time.Time) {}

// dropIdle closes idle connections: one of them was dead, so the others may be too.
func (u *netUpstream) dropIdle() { u.h1.CloseIdleConnections() }

func closeBody(r *Outgoing) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
}

// toNetHeader makes the map that net/http wants.
func toNetHeader(h Header) http.Header {
	m := make(http.Header, len(h)+2)
	for _, f := range h {
		k := http.CanonicalHeaderKey(f.Name)
		m[k] = append(m[k], f.Value)
	}
	return m
}

func fromNetHeader(m http.Header) Header {
	h := make(Header, 0, len(m)+4)
	for k, vs := range m {
		for _, v := range vs {
			h = append(h, Field{k, v})
		}
	}
	return h
}
