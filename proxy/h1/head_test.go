package h1

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRequestAccepted(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		check    func(*testing.T, *Request)
	}{
		{"plain", "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n", func(t *testing.T, r *Request) {
			assert.Equal(t, "POST", string(r.Method))
			assert.Equal(t, "/v1/chat/completions", string(r.Target))
			assert.Equal(t, Framing{Length: 12}, r.Framing)
			assert.False(t, r.Close)
		}},
		{"no body", "GET /v1/models?x=1 HTTP/1.1\r\nhost:a:80\r\n\r\n", func(t *testing.T, r *Request) {
			assert.Equal(t, Framing{}, r.Framing)
			assert.Equal(t, "a:80", string(r.HostValue))
		}},
		{"leading empty lines", "\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", nil},
		{"chunked, any case", "POST / HTTP/1.1\r\nHost: a\r\ntransfer-encoding:  Chunked \r\n\r\n", func(t *testing.T, r *Request) {
			assert.Equal(t, Framing{Length: -1, Chunked: true}, r.Framing)
		}},
		{"1.0 closes", "GET / HTTP/1.0\r\n\r\n", func(t *testing.T, r *Request) { assert.True(t, r.Close) }},
		{"1.0 keep-alive", "GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", func(t *testing.T, r *Request) { assert.False(t, r.Close) }},
		{"close in a list", "GET / HTTP/1.1\r\nHost: a\r\nConnection: foo, Close\r\nFoo: 1\r\nBar: 2\r\n\r\n", func(t *testing.T, r *Request) {
			assert.True(t, r.Close)
			assert.True(t, r.IsHop(1))
			assert.True(t, r.IsHop(2), "listed in Connection")
			assert.False(t, r.IsHop(3))
		}},
		{"connection cannot remove framing", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nConnection: content-length, host\r\n\r\n", func(t *testing.T, r *Request) {
			assert.False(t, r.IsHop(0))
			assert.False(t, r.IsHop(1))
		}},
		{"upgrade", "GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", func(t *testing.T, r *Request) {
			assert.Equal(t, "websocket", string(r.Upgrade))
		}},
		{"upgrade not listed", "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n", func(t *testing.T, r *Request) { assert.Empty(t, r.Upgrade) }},
		{"expect", "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n", func(t *testing.T, r *Request) { assert.True(t, r.Continue) }},
		{"options star", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", nil},
		{"bytes above ASCII in a value", "GET / HTTP/1.1\r\nHost: a\r\nX: \xc3\xa4\r\n\r\n", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var r Request
			n, err := ParseRequest([]byte(tt.in+"body"), &r)
			require.NoError(t, err)
			assert.Equal(t, len(tt.in), n)
			if tt.check != nil {
				tt.check(t, &r)
			}
			for cut := range len(tt.in) {
				n, err := ParseRequest([]byte(tt.in[:cut]), &r)
				require.NoError(t, err, "cut at %d", cut)
				require.Zero(t, n, "cut at %d", cut)
			}
		})
	}
}

func TestRequestRefused(t *testing.T) {
	const h = "Host: a\r\n"
	for name, tt := range map[string]struct {
		in     string
		status int
	}{
		"both lengths":           {"POST / HTTP/1.1\r\n" + h + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
		"both, other order":      {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400},
		"two lengths":            {"POST / HTTP/1.1\r\n" + h + "Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400},
		"two equal lengths":      {"POST / HTTP/1.1\r\n" + h + "Content-Length: 3\r\nContent-Length: 3\r\n\r\n", 400},
		"length list":            {"POST / HTTP/1.1\r\n" + h + "Content-Length: 3, 3\r\n\r\n", 400},
		"plus":                   {"POST / HTTP/1.1\r\n" + h + "Content-Length: +3\r\n\r\n", 400},
		"negative":               {"POST / HTTP/1.1\r\n" + h + "Content-Length: -3\r\n\r\n", 400},
		"hex length":             {"POST / HTTP/1.1\r\n" + h + "Content-Length: 0x3\r\n\r\n", 400},
		"empty length":           {"POST / HTTP/1.1\r\n" + h + "Content-Length:\r\n\r\n", 400},
		"huge length":            {"POST / HTTP/1.1\r\n" + h + "Content-Length: 9999999999999999999\r\n\r\n", 400},
		"coding list":            {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: gzip, chunked\r\n\r\n", 501},
		"coding twice":           {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
		"coding chunked chunked": {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: chunked, chunked\r\n\r\n", 501},
		"coding xchunked":        {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: xchunked\r\n\r\n", 501},
		"coding with tab":        {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: \x0bchunked\r\n\r\n", 400},
		"coding identity":        {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding: identity\r\n\r\n", 501},
		"coding empty":           {"POST / HTTP/1.1\r\n" + h + "Transfer-Encoding:\r\n\r\n", 400},
		"coding in 1.0":          {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
		"space before colon":     {"POST / HTTP/1.1\r\n" + h + "Content-Length : 3\r\n\r\n", 400},
		"fold":                   {"GET / HTTP/1.1\r\n" + h + "X: a\r\n b\r\n\r\n", 400},
		"fold first":             {"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400},
		"bare LF":                {"GET / HTTP/1.1\nHost: a\n\n", 400},
		"bare LF in fields":      {"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400},
		"bare CR":                {"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", 400},
		"NUL in value":           {"GET / HTTP/1.1\r\n" + h + "X: a\x00b\r\n\r\n", 400},
		"no colon":               {"GET / HTTP/1.1\r\n" + h + "X\r\n\r\n", 400},
		"empty name":             {"GET / HTTP/1.1\r\n" + h + ": a\r\n\r\n", 400},
		"name with parenthesis":  {"GET / HTTP/1.1\r\n" + h + "X(y): a\r\n\r\n", 400},
		"no host":                {"GET / HTTP/1.1\r\n\r\n", 400},
		"two hosts":              {"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400},
		"host with path":         {"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400},
		"host with at":           {"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n", 400},
		"absolute form":          {"GET http://a/ HTTP/1.1\r\n" + h + "\r\n", 400},
		"connect":                {"CONNECT a:443 HTTP/1.1\r\n" + h + "\r\n", 400},
		"star on get":            {"GET * HTTP/1.1\r\n" + h + "\r\n", 400},
		"no target":              {"GET HTTP/1.1\r\n" + h + "\r\n", 400},
		"two spaces":             {"GET  / HTTP/1.1\r\n" + h + "\r\n", 400},
		"tab":                    {"GET\t/\tHTTP/1.1\r\n" + h + "\r\n", 400},
		"space in target":        {"GET /a b HTTP/1.1\r\n" + h + "\r\n", 400},
		"fragment":               {"GET /a#b HTTP/1.1\r\n" + h + "\r\n", 400},
		"0.9":                    {"GET /\r\n\r\n", 400},
		"2.0":                    {"GET / HTTP/2.0\r\n" + h + "\r\n", 505},
		"1.2":                    {"GET / HTTP/1.2\r\n" + h + "\r\n", 505},
		"1.10":                   {"GET / HTTP/1.10\r\n" + h + "\r\n", 400},
		"lower case version":     {"GET / http/1.1\r\n" + h + "\r\n", 400},
		"method in brackets":     {"G[T / HTTP/1.1\r\n" + h + "\r\n", 400},
		"huge head":              {"GET / HTTP/1.1\r\n" + h + "X: " + strings.Repeat("a", MaxHead) + "\r\n\r\n", 431},
		"many fields":            {"GET / HTTP/1.1\r\n" + h + strings.Repeat("X: a\r\n", MaxFields) + "\r\n", 431},
	} {
		t.Run(name, func(t *testing.T) {
			var r Request
			n, err := ParseRequest([]byte(tt.in), &r)
			var e *Error
			require.ErrorAs(t, err, &e)
			assert.Equal(t, tt.status, e.Status)
			assert.Zero(t, n)
		})
	}
}

func TestResponse(t *testing.T) {
	for _, tt := range []struct {
		name, in, method string
		want             Framing
		close            bool
	}{
		{"length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "POST", Framing{Length: 5}, false},
		{"chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "POST", Framing{Length: -1, Chunked: true}, false},
		{"to the end", "HTTP/1.1 200 OK\r\n\r\n", "POST", Framing{Length: -1, ToEnd: true}, true},
		{"no reason, no space", "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", "POST", Framing{}, false},
		{"head", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", Framing{}, false},
		{"204", "HTTP/1.1 204 No Content\r\n\r\n", "GET", Framing{}, false},
		{"interim", "HTTP/1.1 103 Early Hints\r\n\r\n", "POST", Framing{}, false},
		{"1.0", "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", "GET", Framing{Length: 1}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var r Response
			n, err := ParseResponse([]byte(tt.in), &r, []byte(tt.method))
			require.NoError(t, err)
			assert.Equal(t, len(tt.in), n)
			assert.Equal(t, tt.want, r.Framing)
			assert.Equal(t, tt.close, r.Close)
		})
	}
	for _, in := range []string{
		"HTTP/1.1 2x0 OK\r\n\r\n", "HTTP/1.1  200 OK\r\n\r\n", "HTTP/2 200\r\n\r\n", "HTTP/1.1 099 x\r\n\r\n", "ICY 200 OK\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
	} {
		var r Response
		_, err := ParseResponse([]byte(in), &r, []byte("GET"))
		var e *Error
		require.ErrorAs(t, err, &e, in)
		assert.Equal(t, 502, e.Status, in)
	}
}

func TestParseAllocatesNothing(t *testing.T) {
	in := []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer x\r\nContent-Length: 12\r\n\r\n")
	out := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	var req Request
	var resp Response
	parse := func() {
		if n, err := ParseRequest(in, &req); n == 0 || err != nil {
			t.Fatal(n, err)
		}
		if n, err := ParseResponse(out, &resp, req.Method); n == 0 || err != nil {
			t.Fatal(n, err)
		}
	}
	parse()
	assert.Zero(t, testing.AllocsPerRun(100, parse))
}

// FuzzRequest: what we accept, net/http accepts and reads alike; the only
// direction that matters for smuggling.
func FuzzRequest(f *testing.F) {
	f.Add([]byte("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n"))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"))
	f.Add([]byte("\r\nGET /?a HTTP/1.0\r\nConnection: keep-alive, x\r\nX:\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var r Request
		n, err := ParseRequest(in, &r)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Status < 400 {
				t.Fatalf("error without a status: %v", err)
			}
			return
		}
		if n == 0 {
			return
		}
		if n > len(in) {
			t.Fatalf("head of %d bytes in %d", n, len(in))
		}
		// net/http takes one leading CRLF less kindly: give it the head alone.
		head := bytes.TrimLeft(in[:n], "\r\n")
		std, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil {
			// Two things are stricter there: what a URL may hold, and Host
			// or Content-Length in forms of its own. Neither is a second
			// reading of the framing.
			return
		}
		if std.Method != string(r.Method) {
			t.Fatalf("method %q, net/http %q", r.Method, std.Method)
		}
		chunked := len(std.TransferEncoding) == 1 && std.TransferEncoding[0] == "chunked"
		if chunked != r.Chunked || !chunked && std.ContentLength != r.Length {
			t.Fatalf("framing %+v, net/http %v %d", r.Framing, std.TransferEncoding, std.ContentLength)
		}
	})
}

func BenchmarkParseRequest(b *testing.B) {
	in := []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAccept: */*\r\nUser-Agent: OpenAI/Python 3.57.0\r\nContent-Type: application/json\r\nAuthorization: Bearer sk-xxxxxxxxxxxxxxxxxx\r\nX-Stainless-Lang: python\r\nContent-Length: 2048\r\n\r\n")
	b.Run("h1", func(b *testing.B) {
		var r Request
		b.ReportAllocs()
		for b.Loop() {
			if n, err := ParseRequest(in, &r); n == 0 || err != nil {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("net/http", func(b *testing.B) {
		rd := bytes.NewReader(in)
		br := bufio.NewReader(rd)
		b.ReportAllocs()
		for b.Loop() {
			rd.Reset(in)
			br.Reset(rd)
			if _, err := http.ReadRequest(br); err != nil {
				b.Fatal(err)
			}
		}
	})
}
