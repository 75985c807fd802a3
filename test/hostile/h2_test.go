package hostile

import (
	"encoding/binary"
	"encoding/xml"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy"
)

// stockFailures are what Go's own HTTP/2 server fails in h2spec 2.2.1 without TLS. The last two it refuses with 400 where
// h2spec wants a reset; TestH2ConnectionFields shows that.
var stockFailures = map[string]bool{
	"http2/3.5: Sends invalid connection preface":                                                                   true,
	"http2/4.2: Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE":                          true,
	"http2/6.5.3: Sends multiple values of SETTINGS_INITIAL_WINDOW_SIZE":                                            true,
	"http2/8.1.2.2: Sends a HEADERS frame that contains the connection-specific header field":                       true,
	"http2/8.1.2.2: Sends a HEADERS frame that contains the TE header field with any value other than \"trailers\"": true,
}

// h2spec against the client listener without TLS: nothing fails that stock Go passes. h2spec 2.2.1 must be in the path.
func TestH2Spec(t *testing.T) {
	bin, err := exec.LookPath("h2spec")
	if err != nil {
		t.Skip("h2spec 2.2.1 is not in the path; .ci/run hostile installs it")
	}
	_, port, err := net.SplitHostPort(startGrapevine(t, newBackend(t)))
	require.NoError(t, err)
	report := filepath.Join(t.TempDir(), "report.xml")
	said, _ := exec.Command(bin, "-h", "127.0.0.1", "-p", port, "-P", "/v1/thing", "-o", "4", "-j", report).CombinedOutput()
	text, err := os.ReadFile(report)
	require.NoError(t, err, "%s", said)
	var doc struct {
		Suites []struct {
			Cases []struct {
				Package string    `xml:"package,attr"`
				Name    string    `xml:"classname,attr"`
				Failure *struct{} `xml:"failure"`
				Error   *struct{} `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	require.NoError(t, xml.Unmarshal(text, &doc))
	ran, failed := 0, 0
	for _, s := range doc.Suites {
		for _, c := range s.Cases {
			if ran++; c.Failure == nil && c.Error == nil {
				continue
			}
			failed++
			assert.True(t, stockFailures[c.Package+": "+c.Name], "%s: %s", c.Package, c.Name)
		}
	}
	assert.Equal(t, 145, ran)
	t.Logf("%d of %d pass; stock Go passes 140", ran-failed, ran)
}

// h2conn speaks just enough HTTP/2 to be impolite.
type h2conn struct {
	net.Conn
	t *testing.T
}

func dialH2(t *testing.T, addr string) *h2conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	h := &h2conn{c, t}
	_, err = io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	require.NoError(t, err)
	h.frame(4, 0, 0, nil)
	return h
}

// frame writes one frame; errors are the server's right.
func (h *h2conn) frame(kind, flags byte, stream uint32, payload []byte) {
	_, _ = h.Write(appendFrame(nil, kind, flags, stream, payload))
}

func appendFrame(b []byte, kind, flags byte, stream uint32, payload []byte) []byte {
	b = append(b, byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload)), kind, flags)
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// headers is a header block of literal fields.
func headers(fields ...string) (b []byte) {
	for i := 0; i < len(fields); i += 2 {
		b = append(b, 0, byte(len(fields[i])))
		b = append(append(b, fields[i]...), byte(len(fields[i+1])))
		b = append(b, fields[i+1]...)
	}
	return b
}

func request(more ...string) []byte {
	return headers(append([]string{":method", "GET", ":scheme", "http", ":path", "/v1/thing", ":authority", "llm.example"}, more...)...)
}

// answer reads until the stream is answered: the first byte of the header block (an indexed :status), or reset.
func (h *h2conn) answer(stream uint32) (first byte, reset bool) {
	h.t.Helper()
	_ = h.SetReadDeadline(time.Now().Add(10 * time.Second))
	var head [9]byte
	for {
		if _, err := io.ReadFull(h, head[:]); err != nil {
			return 0, true
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(h, payload); err != nil {
			return 0, true
		}
		switch {
		case head[3] == 7: // GOAWAY
			return 0, true
		case binary.BigEndian.Uint32(head[5:]) != stream:
		case head[3] == 3:
			return 0, true
		case head[3] == 1:
			return payload[0], false
		}
	}
}

const (
	status200 = 0x88 // HPACK's index of :status 200
	status400 = 0x8c
)

// What h2spec's 8.1.2.2 #1 and #2 send is refused and never reaches the engine: fields of one connection, TE but trailers.
func TestH2ConnectionFields(t *testing.T) {
	b := newBackend(t)
	addr := startGrapevine(t, b)
	first, _ := dialH2With(t, addr, request("te", "trailers"))
	assert.EqualValues(t, status200, first, "TE: trailers is allowed")
	read := b.read.Load()
	for _, f := range [][2]string{{"connection", "keep-alive"}, {"te", "trailers, deflate"}, {"te", "gzip"}, {"transfer-encoding", "chunked"},
		{"upgrade", "websocket"}, {"keep-alive", "1"}, {"proxy-connection", "keep-alive"}} {
		first, reset := dialH2With(t, addr, request(f[0], f[1]))
		assert.True(t, reset || first == status400, "%s: %s gets %#x", f[0], f[1], first)
	}
	assert.Equal(t, read, b.read.Load())
}

// CONNECT and TRACE are refused over HTTP/2 as they are over HTTP/1.1 (405), and never reach the engine.
func TestH2Methods(t *testing.T) {
	b := newBackend(t)
	r := startProxy(t, b.addr, func(*proxy.Config) {})
	for _, block := range [][]byte{
		headers(":method", "TRACE", ":scheme", "http", ":path", "/v1/thing", ":authority", "llm.example"),
		headers(":method", "CONNECT", ":authority", "169.254.169.254:80"),
		headers(":method", "CONNECT", ":scheme", "http", ":path", "/v1/realtime", ":authority", "llm.example", ":protocol", "websocket"),
	} {
		first, reset := dialH2With(t, r.addr, block)
		assert.True(t, reset || first&0xf0 == 0x40, "%#x: a status that is a literal, as 405 is", first)
	}
	assert.Zero(t, b.read.Load())
	assert.NotZero(t, r.proxy.Metrics().Refusals["method"])

	var ps http.Protocols
	ps.SetUnencryptedHTTP2(true)
	hc := &http.Client{Transport: &http.Transport{Protocols: &ps}, Timeout: 10 * time.Second}
	req, err := http.NewRequest(http.MethodTrace, "http://"+r.addr+"/v1/thing", nil)
	require.NoError(t, err)
	resp, err := hc.Do(req)
	require.NoError(t, err)
	_ = resp.Body.Close()
	assert.Equal(t, 2, resp.ProtoMajor)
	assert.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
	assert.Zero(t, b.read.Load())
}

// What is written anew in HTTP/1.1 for the engine must be as it would be if it had come in HTTP/1.1: no field of an HTTP/2 request
// makes it two requests, or one that an engine cannot read.
func TestH2Downgrade(t *testing.T) {
	b := newBackend(t)
	addr := startGrapevine(t, b)
	const hidden = " HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/smuggled"
	pseudo := func(method, path, authority string, more ...string) []byte {
		return headers(append([]string{":method", method, ":scheme", "http", ":path", path, ":authority", authority}, more...)...)
	}
	for name, block := range map[string][]byte{
		"a request in the path":            pseudo("GET", "/v1/thing"+hidden, "llm.example"),
		"a request in the method":          pseudo("GET /v1/thing"+hidden+" HTTP/1.1\r\nX: ", "/v1/thing", "llm.example"),
		"a field in the authority":         pseudo("GET", "/v1/thing", "llm.example\r\nX: y"),
		"a space in the path":              pseudo("GET", "/v1/thing HTTP/1.1", "llm.example"),
		"a space in the method":            pseudo("GET /v1/smuggled", "/v1/thing", "llm.example"),
		"a tab in the path":                pseudo("GET", "/v1/thing\tx", "llm.example"),
		"a NUL in the path":                pseudo("GET", "/v1/thing\x00", "llm.example"),
		"a control byte in the path":       pseudo("GET", "/v1/thing\x01", "llm.example"),
		"a DEL in the path":                pseudo("GET", "/v1/thing\x7f", "llm.example"),
		"a fragment in the path":           pseudo("GET", "/v1/thing#x", "llm.example"),
		"non-ASCII in the path":            pseudo("GET", "/v1/thing?\xc3\xa4", "llm.example"),
		"a space in the query":             pseudo("GET", "/v1/thing?a b", "llm.example"),
		"an empty path":                    pseudo("GET", "", "llm.example"),
		"no slash":                         pseudo("GET", "v1/thing", "llm.example"),
		"an absolute path":                 pseudo("GET", "http://evil.example/v1/thing", "llm.example"),
		"two slashes":                      pseudo("GET", "//evil.example/v1/thing", "llm.example"),
		"a space in the authority":         pseudo("GET", "/v1/thing", "a b"),
		"a slash in the authority":         pseudo("GET", "/v1/thing", "a/b"),
		"user information":                 pseudo("GET", "/v1/thing", "u@a"),
		"a Host beside the authority":      pseudo("GET", "/v1/thing", "llm.example", "host", "evil.example"),
		"a field name in capitals":         pseudo("GET", "/v1/thing", "llm.example", "X-A", "1"),
		"a field name with a colon":        pseudo("GET", "/v1/thing", "llm.example", "x:y", "1"),
		"a field name with CRLF":           pseudo("GET", "/v1/thing", "llm.example", "x\r\ny", "1"),
		"a field name with a space":        pseudo("GET", "/v1/thing", "llm.example", "transfer-encoding ", "chunked"),
		"an empty field name":              pseudo("GET", "/v1/thing", "llm.example", "", "1"),
		"a request in a value":             pseudo("GET", "/v1/thing", "llm.example", "x", "1\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"),
		"a bare LF in a value":             pseudo("GET", "/v1/thing", "llm.example", "x", "1\ny: 2"),
		"a bare CR in a value":             pseudo("GET", "/v1/thing", "llm.example", "x", "1\ry: 2"),
		"a NUL in a value":                 pseudo("GET", "/v1/thing", "llm.example", "x", "1\x00"),
		"a length without a body":          pseudo("GET", "/v1/thing", "llm.example", "content-length", "48"),
		"two lengths":                      pseudo("GET", "/v1/thing", "llm.example", "content-length", "0", "content-length", "48"),
		"a length with plus":               pseudo("GET", "/v1/thing", "llm.example", "content-length", "+0"),
		"a pseudo field behind the others": append(request("x", "1"), headers(":path", "/v1/smuggled")...),
		"two paths":                        append(headers(":path", "/v1/smuggled"), request()...),
		"an unknown pseudo field":          headers(":method", "GET", ":scheme", "http", ":path", "/v1/thing", ":authority", "llm.example", ":odd", "1"),
		"a cookie in crumbs with CRLF":     pseudo("GET", "/v1/thing", "llm.example", "cookie", "a=b", "cookie", "c=d\r\nx: y"),
	} {
		read, malformed, smuggled := b.read.Load(), b.malformed.Load(), b.smuggled.Load()
		dialH2With(t, addr, block)
		time.Sleep(5 * time.Millisecond) // a second request would be read by then
		assert.LessOrEqual(t, b.read.Load()-read, int32(1), name)
		assert.Equal(t, malformed, b.malformed.Load(), "%s: the backend got what it cannot read", name)
		assert.Equal(t, smuggled, b.smuggled.Load(), "%s: a hidden request", name)
	}

	// The body is framed by frames: a length that says something else is an error, and never the engine's framing.
	for name, data := range map[string]string{"shorter than its length": "{}", "longer than its length": strings.Repeat(" ", 60)} {
		read, malformed := b.read.Load(), b.malformed.Load()
		h := dialH2(t, addr)
		h.frame(1, 4, 1, headers(":method", "POST", ":scheme", "http", ":path", "/v1/chat/completions", ":authority", "llm.example", "content-length", "48"))
		h.frame(0, 1, 1, []byte(data))
		first, reset := h.answer(1)
		assert.True(t, reset || first == status400, "%s: %#x", name, first)
		assert.Equal(t, read, b.read.Load(), name)
		assert.Equal(t, malformed, b.malformed.Load(), name)
	}
}

func dialH2With(t *testing.T, addr string, block []byte) (byte, bool) {
	t.Helper()
	h := dialH2(t, addr)
	h.frame(1, 5, 1, block) // END_STREAM and END_HEADERS
	return h.answer(1)
}

// C42, rapid reset (CVE-2023-44487): 10,000 requests (50,000 with -long) that are reset at once neither stop a good client nor stay under way.
func TestC42RapidReset(t *testing.T) {
	b := newBackend(t)
	r := startProxy(t, b.addr, func(*proxy.Config) {})
	each := uint32(2500)
	if *long {
		each = 12_500
	}
	for range 4 {
		h := dialH2(t, r.addr)
		go func() { _, _ = io.Copy(io.Discard, h) }()
		block := request()
		var out []byte
		for i := range each {
			out = appendFrame(out, 1, 5, 2*i+1, block)
			out = appendFrame(out, 3, 0, 2*i+1, []byte{0, 0, 0, 8})
		}
		go func() { _, _ = h.Write(out) }()
	}
	hc := &http.Client{Timeout: 20 * time.Second}
	for range 20 {
		begin := time.Now()
		resp, err := hc.Post("http://"+r.addr+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m"}`))
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 200, resp.StatusCode)
		assert.Less(t, time.Since(begin), 10*time.Second)
	}
	assert.Eventually(t, func() bool { return r.proxy.Inflight() == 0 }, time.Minute, 20*time.Millisecond, "nothing stays under way")
	t.Logf("the backend got %d of %d", b.read.Load()-20, 4*each)
}
