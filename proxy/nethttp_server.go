package proxy

import (
	"bufio"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// handler puts the core behind a net/http server.
type handler struct {
	p    *Proxy
	role role
}

// ServeHTTP implements http.Handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d := &netDown{w: w, rc: http.NewResponseController(w), r: r, p: h.p}
	in := &RequestHead{
		Method: r.Method, Target: r.RequestURI, Host: r.Host, Scheme: "http", Remote: r.RemoteAddr,
		Header: fromNetHeader(r.Header), Length: r.ContentLength, HTTP2: r.ProtoMajor >= 2,
	}
	if !strings.HasPrefix(in.Target, "/") { // absolute form
		in.Target = r.URL.RequestURI()
	}
	if r.TLS != nil {
		in.Scheme = "https"
	}
	if h.role == roleTarget {
		in.Peer = h.p.provenPeer(r)
	}
	var src io.Reader
	if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
		src = r.Body
		if !isGRPC(in.Header) { // which may be silent for long
			src = &pacedBody{Reader: r.Body, rc: d.rc}
		}
	}
	if !in.HTTP2 {
		in.Upgrade = upgradeType(in.Header)
		if r.ContentLength < 0 || r.ContentLength > h.p.cfg.KeepBody {
			// A body that is not kept whole is still being read when the answer begins.
			_ = d.rc.EnableFullDuplex() // only HTTP/1 needs and knows it
		}
	}
	x := h.p.exchange()
	defer newAttempt(r.Context(), x.life)()
	x.serve(h.role, in, src, d)
	x.recycle()
	if d.aborted {
		panic(http.ErrAbortHandler)
	}
}

// upgradeType is the protocol that the request wants to change to, if it is one that we pass on: WebSocket alone.
// Others, h2c above all, are ignored, so that nothing reaches the engine past our rules (C39).
func upgradeType(h Header) string {
	if !strings.EqualFold(h.Get("upgrade"), "websocket") {
		return ""
	}
	for _, f := range h {
		if strings.EqualFold(f.Name, "connection") {
			for t := range strings.SplitSeq(f.Value, ",") {
				if strings.EqualFold(strings.TrimSpace(t), "upgrade") {
					return "websocket"
				}
			}
		}
	}
	return ""
}

// netDown is a Downstream over net/http.
type netDown struct {
	w       http.ResponseWriter
	rc      *http.ResponseController
	r       *http.Request
	p       *Proxy
	trailer []string // announced
	timed   time.Time
	aborted bool
}

// deadline renews the write deadline now and then, as wireDown does.
func (d *netDown) deadline() {
	if now := time.Now(); now.Sub(d.timed) > writeTimeout/8 {
		d.timed = now
		_ = d.rc.SetWriteDeadline(now.Add(writeTimeout)) // without it a client that takes nothing is kept
	}
}

// Head implements Downstream.
func (d *netDown) Head(h *ResponseHead, flush bool) error {
	m := d.w.Header()
	for _, f := range h.Header {
		m.Add(f.Name, f.Value)
	}
	if _, ok := m["Content-Type"]; !ok {
		m["Content-Type"] = nil // none came, none is guessed
	}
	if h.Length >= 0 && h.Status != http.StatusNoContent {
		m["Content-Length"] = []string{strconv.FormatInt(h.Length, 10)}
	}
	for _, t := range h.Trailer {
		m.Add("Trailer", t)
		d.trailer = append(d.trailer, t)
	}
	if d.p.draining.Load() {
		m.Set("Connection", "close") // over HTTP/2 the server makes a GOAWAY of it
	}
	d.deadline()
	d.w.WriteHeader(h.Status)
	if flush {
		return d.rc.Flush()
	}
	return nil
}

// Interim implements interimWriter.
func (d *netDown) Interim(h Header) error {
	m := d.w.Header()
	for _, f := range h {
		m.Set(f.Name, f.Value)
	}
	d.deadline()
	d.w.WriteHeader(http.StatusProcessing) // the server writes interim heads out at once
	for _, f := range h {
		m.Del(f.Name)
	}
	return nil
}

// Write implements Downstream.
func (d *netDown) Write(p []byte) error {
	d.deadline()
	if _, err := d.w.Write(p); err != nil {
		return err
	}
	return d.rc.Flush()
}

// Finish implements Downstream.
func (d *netDown) Finish(trailer Header) error {
	m := d.w.Header()
	for _, f := range trailer {
		name := http.TrailerPrefix + f.Name
		for _, t := range d.trailer {
			if strings.EqualFold(t, f.Name) {
				name = t
			}
		}
		m.Add(name, f.Value)
	}
	return nil // the server sends the end when the handler returns
}

// Abort implements Downstream; the handler ends the connection when it returns.
func (d *netDown) Abort() { d.aborted = true }

// Tunnel implements Downstream.
func (d *netDown) Tunnel(h *ResponseHead) (io.ReadWriteCloser, error) {
	conn, rw, err := d.rc.Hijack()
	if err != nil {
		return nil, err
	}
	resp := &http.Response{StatusCode: h.Status, ProtoMajor: 1, ProtoMinor: 1, Header: toNetHeader(h.Header)}
	if err := resp.Write(conn); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return &hijacked{Conn: conn, r: rw.Reader}, nil
}

// hijacked is a client's connection with the bytes that were read ahead.
type hijacked struct {
	net.Conn
	r *bufio.Reader
}

// Read gives the early bytes first (C40).
func (h *hijacked) Read(p []byte) (int, error) {
	if h.r.Buffered() > 0 {
		return h.r.Read(p)
	}
	return h.Conn.Read(p)
}

// NewServer returns a server for one of the handlers: HTTP/1.1 and HTTP/2, the latter without TLS too if tc is nil.
// It has no limit on the time of a request or an answer; heads must come within 10 s, and idle connections of clients
// and agents are closed after two minutes. The caller listens, serves and shuts down.
func NewServer(h http.Handler, tc *tls.Config, log *slog.Logger) *http.Server {
	var ps http.Protocols
	ps.SetHTTP1(true)
	if tc == nil {
		ps.SetUnencryptedHTTP2(true)
	} else {
		ps.SetHTTP2(true)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &http.Server{
		Handler: h, TLSConfig: tc, Protocols: &ps,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    maxHead,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 1000},
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug), // its lines are about broken clients
	}
}
