package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"
)

// Errors of a page that did not come; test with errors.Is.
var (
	// ErrTimeout: the engine did not answer in time. It is loaded, not down; keep what was read before.
	ErrTimeout = errors.New("no answer in time")
	// ErrRefused: nobody listens. The engine is down or has not started.
	ErrRefused = errors.New("connection refused")
	// ErrTruncated: the page ended early; none of it was used.
	ErrTruncated = errors.New("page cut off in transfer")
	// ErrTooLarge: the page is beyond Config.MaxBytes.
	ErrTooLarge = errors.New("page too large")
	// ErrNotLoaded: a request would make the engine load a model, so none was sent.
	ErrNotLoaded = errors.New("a request would load the model")
)

// StatusError is an HTTP answer that is not 200.
type StatusError struct {
	Path   string
	Status int
	Body   string // its start
	Hint   string // what the operator can do
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s answered %d", e.Path, e.Status)
	if e.Body != "" {
		s += ": " + e.Body
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// absent tells whether the engine has no such page.
func (e *StatusError) absent() bool {
	return e.Status == http.StatusNotFound || e.Status == http.StatusMethodNotAllowed || e.Status == http.StatusNotImplemented
}

// idleTimeout is below the 5 s after which uvicorn and llama.cpp close an idle connection.
const idleTimeout = 3 * time.Second

// newClient makes the default client for the engine's URL.
func newClient(u *url.URL) *http.Client {
	dialer := &net.Dialer{Timeout: time.Second}
	t := &http.Transport{
		DialContext:         dialer.DialContext,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 2,
		IdleConnTimeout:     idleTimeout,
	}
	if u.Scheme == "unix" {
		engine := "engine:80"
		t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr != engine { // a metrics page elsewhere
				return dialer.DialContext(ctx, network, addr)
			}
			return dialer.DialContext(ctx, "unix", u.Path)
		}
	}
	return &http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// baseURL is what paths are appended to.
func baseURL(u *url.URL) string {
	if u.Scheme == "unix" {
		return "http://engine"
	}
	return u.Scheme + "://" + u.Host + strings.TrimSuffix(u.EscapedPath(), "/")
}

// address returns the URL of a path of a [Page].
func (r *Reader) address(path string) string {
	switch {
	case strings.HasPrefix(path, "http://"), strings.HasPrefix(path, "https://"):
		return path
	case strings.HasPrefix(path, ":") && r.cfg.URL.Scheme != "unix":
		port, rest, _ := strings.Cut(path[1:], "/")
		return r.cfg.URL.Scheme + "://" + net.JoinHostPort(r.cfg.URL.Hostname(), port) + "/" + rest
	}
	return r.base + path
}

// answer is a page that came whole.
type answer struct {
	status      int
	body        []byte
	contentType string
	server      string
}

// get fetches one page into buf's storage. The error is one of the sentinels above, wrapped, or another transport
// error; an answer with any status is no error.
func (r *Reader) get(ctx context.Context, path, accept string, buf []byte) (answer, error) {
	return r.do(ctx, http.MethodGet, path, accept, nil, buf)
}

func (r *Reader) do(ctx context.Context, method, path, accept string, body, buf []byte) (answer, error) {
	var rd io.Reader
	if body != nil {
		rd = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, r.address(path), rd)
	if err != nil {
		return answer{}, fmt.Errorf("%s: %w", path, err)
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", "grapevine")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.cfg.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+r.cfg.APIKey)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return answer{}, fmt.Errorf("%s: %w", path, classify(err))
	}
	defer func() { _ = resp.Body.Close() }()
	a := answer{status: resp.StatusCode, contentType: resp.Header.Get("Content-Type"), server: resp.Header.Get("Server")}
	a.body, err = readAll(resp.Body, buf, r.cfg.maxBytes())
	if err != nil {
		return a, fmt.Errorf("%s: %w", path, classify(err))
	}
	// A page without length or chunks ends with its connection, and nothing tells a whole one from a cut one but its
	// last newline.
	if resp.ContentLength < 0 && len(resp.TransferEncoding) == 0 && resp.ProtoMajor == 1 &&
		len(a.body) > 0 && a.body[len(a.body)-1] != '\n' && !strings.Contains(a.contentType, "json") {
		return a, fmt.Errorf("%s: %w", path, ErrTruncated)
	}
	return a, nil
}

// readAll reads to the end into buf's storage, at most limit bytes.
func readAll(rd io.Reader, buf []byte, limit int) ([]byte, error) {
	buf = buf[:0]
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, make([]byte, max(len(buf), 64<<10))...)[:len(buf)]
		}
		n, err := rd.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if len(buf) > limit {
			return buf, ErrTooLarge
		}
		if err == io.EOF {
			return buf, nil
		}
		if err != nil {
			return buf, err
		}
	}
}

// classify maps transport errors to the sentinels that callers branch on; the text of the original stays.
func classify(err error) error {
	var timeout net.Error
	switch {
	case errors.Is(err, ErrTooLarge):
		return err
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return ErrTimeout
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT): // ENOENT: no such unix socket
		return ErrRefused
	case errors.Is(err, io.ErrUnexpectedEOF):
		return ErrTruncated
	}
	return err
}

// snippet is the start of a body, on one line, for error messages.
func snippet(b []byte) string {
	const limit = 160
	if len(b) > limit {
		b = b[:limit]
	}
	return strings.Join(strings.Fields(strings.ToValidUTF8(string(b), "?")), " ")
}
