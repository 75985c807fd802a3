package proxy

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// The hop between agents over their TLS: the boot id of the member list is demanded, keys may change while the link
// lives, gRPC goes through too, and who has no common key is not sent anything.
func TestPeerTLS(t *testing.T) {
	key := func(b byte) []byte { return []byte(strings.Repeat(string(b), 32)) }
	u := listenEngine(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		_, _ = fmt.Fprint(w, r.Proto)
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	}))
	own := listenEngine(t, answers(200, "own"))
	server, err := peertls.New(2, [][]byte{key('a')})
	require.NoError(t, err)
	client, err := peertls.New(1, [][]byte{key('a')})
	require.NoError(t, err)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	member := routing.Member{Boot: 2, Node: "n2", Addr: l.Addr().String()}
	target, err := New(Config{Table: routing.NewTable(member), Policy: inOrder{2}, EngineURL: u})
	require.NoError(t, err)
	tc := server.ServerConfig(nil, "h2", "http/1.1")
	srv := NewServer(target.PeerHandler(), tc, nil)
	go func() { _ = srv.Serve(tls.NewListener(server.Listener(l), tc)) }()
	t.Cleanup(func() { _ = srv.Close() })

	tab := routing.NewTable(routing.Member{Boot: 1, Node: "n1"})
	tab.SetMember(member, time.Now())
	entry, err := New(Config{Table: tab, Policy: inOrder{2, 3, 1}, EngineURL: own,
		PeerTLS: func(boot uint64) *tls.Config { return client.ClientConfig(boot) }})
	require.NoError(t, err)
	front := NewServer(entry.ClientHandler(), nil, nil)
	fl, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = front.Serve(fl) }()
	t.Cleanup(func() { _ = front.Close() })

	hc := (&fleet{net: &memNet{}}).client(true)
	hc.Transport.(*http.Transport).DialContext = nil
	post := func(ctype string) string {
		req, _ := http.NewRequest("POST", "http://"+fl.Addr().String()+chatPath, strings.NewReader(chatBody(false)))
		req.Header.Set("Content-Type", ctype)
		resp, err := hc.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(b)
	}
	assert.Equal(t, "HTTP/1.1", post("application/json"))
	assert.Equal(t, "HTTP/2.0", post("application/grpc"))

	// A new key, and the old one gone: the link goes on under the new one.
	require.NoError(t, server.SetKeys([][]byte{key('b'), key('a')}))
	require.NoError(t, client.SetKeys([][]byte{key('b'), key('a')}))
	require.NoError(t, server.SetKeys([][]byte{key('b')}))
	require.NoError(t, client.SetKeys([][]byte{key('b')}))
	assert.Equal(t, "HTTP/1.1", post("application/json"))

	// No common key, and another boot id at the address: nothing is sent there, the own engine serves.
	require.NoError(t, client.SetKeys([][]byte{key('c')}))
	entry.links.closeAll()
	assert.Equal(t, "own", post("application/json"))
	require.NoError(t, client.SetKeys([][]byte{key('b')}))
	member.Boot = 3
	tab.RemoveMember(2, time.Now())
	tab.SetMember(member, time.Now())
	assert.Equal(t, "own", post("application/json"))
	assert.NotZero(t, entry.Metrics().Retries[retryDial])
}
