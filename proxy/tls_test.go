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

// tlsPair is an entry agent (boot 1) and a target (boot 2) with TLS between them, both under key a.
type tlsPair struct {
	client, server *peertls.Identity
	entry          *Proxy
	tab            *routing.Table // of the entry
	member         routing.Member // the target
	front          string         // the entry's client address
	hc             *http.Client
}

func tlsKey(b byte) []byte { return []byte(strings.Repeat(string(b), 32)) }

func newTLSPair(t *testing.T, engine http.Handler) *tlsPair {
	t.Helper()
	p := &tlsPair{}
	u := listenEngine(t, engine)
	own := listenEngine(t, answers(200, "own"))
	var err error
	p.server, err = peertls.New(2, [][]byte{tlsKey('a')})
	require.NoError(t, err)
	p.client, err = peertls.New(1, [][]byte{tlsKey('a')})
	require.NoError(t, err)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p.member = routing.Member{Boot: 2, Node: "n2", Addr: l.Addr().String()}
	target, err := New(Config{Table: routing.NewTable(p.member), Policy: inOrder{2}, EngineURL: u})
	require.NoError(t, err)
	tc := p.server.ServerConfig(nil, "h2", "http/1.1")
	srv := NewServer(target.PeerHandler(), tc, nil)
	go func() { _ = srv.Serve(tls.NewListener(p.server.Listener(l), tc)) }()
	t.Cleanup(func() { _ = srv.Close() })

	p.tab = routing.NewTable(routing.Member{Boot: 1, Node: "n1"})
	p.tab.SetMember(p.member, time.Now())
	p.entry, err = New(Config{Table: p.tab, Policy: inOrder{2, 3, 1}, EngineURL: own, PeerTLS: p.client.Client})
	require.NoError(t, err)
	front := NewServer(p.entry.ClientHandler(), nil, nil)
	fl, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = front.Serve(fl) }()
	t.Cleanup(func() { _ = front.Close() })
	p.front = fl.Addr().String()
	p.hc = (&fleet{net: &memNet{}}).client(true)
	p.hc.Transport.(*http.Transport).DialContext = nil
	return p
}

func (p *tlsPair) send(t *testing.T, ctype string) *http.Response {
	t.Helper()
	req, _ := http.NewRequest("POST", "http://"+p.front+chatPath, strings.NewReader(chatBody(false)))
	req.Header.Set("Content-Type", ctype)
	resp, err := p.hc.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func (p *tlsPair) post(t *testing.T, ctype string) string {
	t.Helper()
	b, err := io.ReadAll(p.send(t, ctype).Body)
	require.NoError(t, err)
	return string(b)
}

// The hop between agents over their TLS: the boot id of the member list is demanded, keys may change while the link
// lives, gRPC goes through too, and who has no common key is not sent anything.
func TestPeerTLS(t *testing.T) {
	p := newTLSPair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		_, _ = fmt.Fprint(w, r.Proto)
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	}))
	assert.Equal(t, "HTTP/1.1", p.post(t, "application/json"))
	assert.Equal(t, "HTTP/2.0", p.post(t, "application/grpc"))

	// A new key, and the old one gone: the link goes on under the new one.
	require.NoError(t, p.server.SetKeys([][]byte{tlsKey('b'), tlsKey('a')}))
	require.NoError(t, p.client.SetKeys([][]byte{tlsKey('b'), tlsKey('a')}))
	require.NoError(t, p.server.SetKeys([][]byte{tlsKey('b')}))
	require.NoError(t, p.client.SetKeys([][]byte{tlsKey('b')}))
	assert.Equal(t, "HTTP/1.1", p.post(t, "application/json"))

	// No common key, and another boot id at the address: nothing is sent there, the own engine serves.
	require.NoError(t, p.client.SetKeys([][]byte{tlsKey('c')}))
	assert.Equal(t, "own", p.post(t, "application/json"))
	require.NoError(t, p.client.SetKeys([][]byte{tlsKey('b')}))
	p.member.Boot = 3
	p.tab.RemoveMember(2, time.Now())
	p.tab.SetMember(p.member, time.Now())
	assert.Equal(t, "own", p.post(t, "application/json"))
	assert.NotZero(t, p.entry.Metrics().Retries[retryDial])
}

// What was dialled to a peer ends as what was accepted from it does: with its key, and with its leaving. That is so for
// kept connections over HTTP/1.1 and HTTP/2 and for a stream under way, whose client sees a cut and no end.
func TestDialledConnectionsEndWithKeyAndMember(t *testing.T) {
	for name, end := range map[string]func(*tlsPair) error{
		"key removed here":  func(p *tlsPair) error { return p.client.SetKeys([][]byte{tlsKey('b')}) },
		"key removed there": func(p *tlsPair) error { return p.server.SetKeys([][]byte{tlsKey('b')}) },
		"member left":       func(p *tlsPair) error { p.client.Drop(2); return nil },
		"we left":           func(p *tlsPair) error { p.server.Drop(1); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			hold := make(chan struct{})
			t.Cleanup(func() { close(hold) })
			p := newTLSPair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if r.Header.Get("Content-Type") != "application/json" {
					_, _ = fmt.Fprint(w, r.Proto)
					return
				}
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n")
				_ = http.NewResponseController(w).Flush()
				<-hold
			}))
			assert.Equal(t, "HTTP/1.1", p.post(t, "text/plain"))
			assert.Equal(t, "HTTP/2.0", p.post(t, "application/grpc"))
			resp := p.send(t, "application/json")
			_, err := io.ReadFull(resp.Body, make([]byte, 10))
			require.NoError(t, err)
			assert.GreaterOrEqual(t, p.client.Open(), 2, "one for each protocol")
			require.NoError(t, end(p))
			_, err = io.ReadAll(resp.Body)
			require.Error(t, err, "a cut, no end")
			none := func(of *peertls.Identity) func() bool { return func() bool { return of.Open() == 0 } }
			assert.Eventually(t, none(p.client), 5*time.Second, 5*time.Millisecond, "dialled: %d", p.client.Open())
			assert.Eventually(t, none(p.server), 5*time.Second, 5*time.Millisecond, "accepted: %d", p.server.Open())
		})
	}
}
