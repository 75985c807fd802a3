package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"time"
)

const maxHead = 256 << 10 // bytes of an answer's head

// netUpstream sends requests through net/http: HTTP/1.1, or HTTP/2 where the request needs it (gRPC).
type netUpstream struct {
	scheme, host string
	h1, h2       *http.Transport
}

func newNetUpstream(connect connector, host string, secure bool, idle time.Duration) *netUpstream {
	u := &netUpstream{scheme: "http", host: host}
	if secure {
		u.scheme = "https"
	}
	make1 := func(h2 bool) *http.Transport {
		var ps http.Protocols
		switch {
		case !h2:
			ps.SetHTTP1(true)
		case secure:
			ps.SetHTTP2(true)
		default:
			ps.SetUnencryptedHTTP2(true)
		}
		t := &http.Transport{
			DisableCompression:     true, // the engine sees what the client asked for (C09)
			MaxIdleConns:           0,
			MaxIdleConnsPerHost:    4096,
			IdleConnTimeout:        idle,
			MaxResponseHeaderBytes: maxHead,
			Protocols:              &ps,
		}
		dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
			if h2 {
				return connect(ctx, "h2")
			}
			return connect(ctx, "http/1.1")
		}
		if secure {
			t.DialTLSContext = dial
		} else {
			t.DialContext = dial
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
	ct := tr.client()
	if interim := r.Interim; interim != nil { // r is used again when the attempt is over
		ct.Got1xxResponse = func(code int, h textproto.MIMEHeader) error {
			if code > 101 {
				interim(fromNetHeader(http.Header(h)))
			}
			return nil
		}
	}
	req := (&http.Request{
		Method: r.Method, URL: target, Host: r.Host, Header: toNetHeader(r.Header), ContentLength: r.Length,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}).WithContext(httptrace.WithClientTrace(ctx, ct))
	if r.Body != nil {
		req.Body = r.Body
		reopen := r.Reopen
		if kept, ok := r.Body.(*bodyReader); ok && kept.b.complete() {
			reopen = kept.b.open
		}
		if reopen != nil {
			req.GetBody = func() (io.ReadCloser, error) { return reopen(), nil }
		} else if r.HTTP2 {
			w := &rewinder{src: r.Body}
			defer w.seal()
			req.Body, _ = w.reader()
			req.GetBody = w.reader
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
	resp, err := t.RoundTrip(req) //nolint:bodyclose // the answer's owner closes it
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
