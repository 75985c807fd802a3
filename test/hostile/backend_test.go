package hostile

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// backend is an engine that counts what it reads: requests that are whole, and bytes that are none.
type backend struct {
	addr      string
	read      atomic.Int32 // whole requests
	malformed atomic.Int32 // what it could not read, or what frames itself twice
	smuggled  atomic.Int32 // requests for the path that the corpus hides
}

func newBackend(t *testing.T) *backend {
	t.Helper()
	b := &backend{}
	b.addr = acceptAll(t, b.serve)
	return b
}

// acceptAll serves each connection to the address that it returns, until the test ends.
func acceptAll(t *testing.T, serve func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	return ln.Addr().String()
}

func (b *backend) serve(c net.Conn) {
	defer c.Close()
	br := bufio.NewReader(c)
	for {
		if _, err := br.Peek(1); err != nil {
			return
		}
		r, err := http.ReadRequest(br)
		if err != nil {
			b.malformed.Add(1)
			return
		}
		if len(r.TransferEncoding) > 0 && r.Header.Get("Content-Length") != "" {
			b.malformed.Add(1)
		}
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return // the front broke off: not a whole request
		}
		b.read.Add(1)
		if strings.Contains(r.RequestURI, "smuggled") {
			b.smuggled.Add(1)
		}
		const body = `{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]}`
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 65\r\n\r\n"+body); err != nil {
			return
		}
	}
}
