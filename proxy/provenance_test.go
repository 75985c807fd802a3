package proxy

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy/link"
	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// A request between agents, and a link, that name another entry than the one whose certificate the connection shows are
// refused and counted; the honest ones pass on the same connection.
func TestHopNamesTheConnectionsAgent(t *testing.T) {
	key := []byte("0123456789abcdef0123456789abcdef")
	target, err := peertls.New(2, [][]byte{key})
	require.NoError(t, err)
	asker, err := peertls.New(7, [][]byte{key})
	require.NoError(t, err)
	u := listenEngine(t, answers(200, okAnswer))
	p, err := New(Config{Table: routing.NewTable(routing.Member{Boot: 2, Node: "n2"}), Policy: inOrder{2}, EngineURL: u,
		PeerBoot: func(cs tls.ConnectionState) uint64 { _, boot, _ := target.Peer(cs); return boot }})
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == LinkPath {
			p.ServeLink(w, r)
			return
		}
		p.PeerHandler().ServeHTTP(w, r)
	})
	s := p.PeerServer(NewServer(h, nil, nil), "/grapevine/")
	go func() { _ = s.Serve(tls.NewListener(target.Listener(ln), target.ServerConfig(nil, "h2", "http/1.1"))) }()
	t.Cleanup(func() { _ = s.Close() })

	dial := func(proto string) *tls.Conn {
		c, err := tls.Dial("tcp", ln.Addr().String(), asker.ClientConfig(2, proto))
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	body := chatBody(false)
	for hop, status := range map[string]int{"7": 200, "8": 403, "2": 508, "x": 508} {
		c := dial("http/1.1")
		_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: a\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s", chatPath, headerHop, hop, len(body), body)
		require.NoError(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, status, resp.StatusCode, "hop %s over HTTP/1.1", hop)

		tr := &http.Transport{TLSClientConfig: asker.ClientConfig(2), ForceAttemptHTTP2: true}
		req, _ := http.NewRequest("POST", "https://"+ln.Addr().String()+chatPath, strings.NewReader(body))
		req.Header.Set(headerHop, hop)
		resp, err = tr.RoundTrip(req)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 2, resp.ProtoMajor)
		assert.Equal(t, status, resp.StatusCode, "hop %s over HTTP/2", hop)
		tr.CloseIdleConnections()
	}
	for hop, status := range map[string]int{"7": 101, "8": 403} {
		c := dial("http/1.1")
		_, err = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s: %s\r\n\r\n", LinkPath, link.Protocol, headerHop, hop)
		require.NoError(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, status, resp.StatusCode, "link of hop %s", hop)
	}
	assert.EqualValues(t, 3, p.Metrics().Refusals[errForgedHop.Reason])
}
