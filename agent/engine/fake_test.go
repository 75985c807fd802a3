package engine

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// page is one answer of a fake engine.
type page struct {
	status int
	header http.Header
	body   []byte
}

func text(body string) page { return page{status: 200, body: []byte(body)} }

func status(code int, body string) page { return page{status: code, body: []byte(body)} }

// captured loads a recorded page; a file that starts with a status line is a whole reply.
func captured(t testing.TB, name string) page {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	if !bytes.HasPrefix(b, []byte("HTTP/1.")) {
		return page{status: 200, body: b}
	}
	head, body, ok := bytes.Cut(b, []byte("\r\n\r\n"))
	if !ok {
		head, body, ok = bytes.Cut(b, []byte("\n\n"))
	}
	require.True(t, ok, name)
	p := page{header: http.Header{}, body: body}
	for i, line := range strings.Split(string(head), "\n") {
		line = strings.TrimSuffix(line, "\r")
		if i == 0 {
			p.status, err = strconv.Atoi(strings.Fields(line)[1])
			require.NoError(t, err)
			continue
		}
		k, v, _ := strings.Cut(line, ":")
		switch k = textproto.CanonicalMIMEHeaderKey(k); k {
		case "Content-Type", "Server":
			p.header.Set(k, strings.TrimSpace(v))
		}
	}
	return p
}

// fakeEngine answers with fixed pages and keeps what it was asked.
type fakeEngine struct {
	*httptest.Server
	mu     sync.Mutex
	pages  map[string]page
	calls  []string
	bodies []string
}

func newFake(t testing.TB, pages map[string]page) *fakeEngine {
	f := &fakeEngine{pages: pages}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body bytes.Buffer
	_, _ = body.ReadFrom(r.Body)
	f.mu.Lock()
	f.calls = append(f.calls, r.Method+" "+r.URL.Path)
	f.bodies = append(f.bodies, body.String())
	p, ok := f.pages[r.URL.Path]
	f.mu.Unlock()
	if !ok {
		p = status(404, `{"detail":"Not Found"}`)
	}
	for k, v := range p.header {
		w.Header()[k] = v
	}
	w.WriteHeader(p.status)
	_, _ = w.Write(p.body)
}

func (f *fakeEngine) set(path string, p page) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pages[path] = p
}

// asked returns the calls so far and forgets them.
func (f *fakeEngine) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	calls := f.calls
	f.calls, f.bodies = nil, nil
	return calls
}

func (f *fakeEngine) url(t testing.TB) *url.URL {
	u, err := url.Parse(f.URL)
	require.NoError(t, err)
	return u
}

// reader makes a Reader for a fake engine.
func (f *fakeEngine) reader(t testing.TB, kind Kind) *Reader {
	r := New(Config{URL: f.url(t), Kind: kind})
	require.NoError(t, r.cfg.Validate())
	t.Cleanup(r.Close)
	return r
}

// readText reads one Prometheus page as the given kind.
func readText(t testing.TB, kind Kind, body string) Reading {
	t.Helper()
	f := newFake(t, nil)
	f.pages = map[string]page{"/metrics": text(body)}
	r := f.reader(t, kind)
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	return rd
}

func parseURL(t testing.TB, s string) *url.URL {
	u, err := url.Parse(s)
	require.NoError(t, err)
	return u
}
