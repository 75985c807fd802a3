package hostile

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// meter counts what goes over connections, TLS and all.
type meter struct{ in, out atomic.Int64 }

type metered struct {
	net.Conn
	m *meter
}

func (c metered) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.m.out.Add(int64(n)) // out of the agent
	return n, err
}

func (c metered) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.m.in.Add(int64(n))
	return n, err
}

func (m *meter) dial(t *testing.T, network, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, addr)
	require.NoError(t, err)
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	return metered{c, m}
}

// ask sends text and returns all that comes back.
func (m *meter) ask(t *testing.T, addr, text string) string {
	t.Helper()
	c := m.dial(t, "tcp", addr)
	defer c.Close()
	_, _ = io.WriteString(c, text)
	b, _ := io.ReadAll(c)
	return string(b)
}

// What a stranger on the agents' network can try, as one table: everything is refused, counted, told in one line of the log in
// 10 s, and answered with no more bytes than it took (no amplification).
// A client's mistakes and a second row of one place within 10 s have no line. Replays of recorded packets are package gossip's
// TestReplayedPackets.
func TestNeighbourTable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	sum := sha256.Sum256([]byte("the-right-key"))
	require.NoError(t, os.WriteFile(file, []byte("sha256:"+hex.EncodeToString(sum[:])+"\n"), 0o600))
	sim, err := enginesim.NewServer(enginesim.ServerConfig{Dialect: "vllm", Model: "m", Params: enginesim.Rates(100_000, time.Millisecond, 8)})
	require.NoError(t, err)
	go func() { _ = sim.Run(t.Context()) }()
	engine := serveEngine(t, sim)
	v := startVictimWith(t, func(c *agent.Config) {
		c.EngineURL, c.GossipKey, c.APIKeysFile = engine, gossipKey('k'), file
	})
	// Where a client would have requests sent: nobody must come there.
	decoy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = decoy.Close() })
	var came atomic.Int32
	go func() {
		for {
			c, err := decoy.Accept()
			if err != nil {
				return
			}
			came.Add(1)
			_ = c.Close()
		}
	}()

	const body = `{"model":"m","max_tokens":2,"messages":[{"role":"user","content":"hello there"}]}`
	post := func(target, key string, more ...string) string {
		head := "POST " + target + " HTTP/1.1\r\nHost: llm.example\r\nUser-Agent: OpenAI/Python 2.1.0\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\n" +
			"X-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.1.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n" +
			"Content-Type: application/json\r\nConnection: close\r\nAuthorization: Bearer " + key + "\r\n"
		return head + strings.Join(more, "") + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
	}
	refusals := func() float64 { return v.metric(t, "grapevine_refusals_total") }
	strangers := func(where string) func() float64 {
		return func() float64 { return v.metric(t, `grapevine_strangers_total{where="`+where+`"}`) }
	}
	otherKeys, err := gossip.ParseKeys(gossipKey('x'))
	require.NoError(t, err)
	stranger, err := peertls.New(66, otherKeys)
	require.NoError(t, err)
	const many = 200

	for _, row := range []struct {
		name  string
		count func() float64
		line  string // part of the one line of log
		try   func(m *meter) (tries int)
	}{
		{"joins by TCP without the key", strangers("gossip"), "memberlist", func(m *meter) int {
			for range many {
				m.ask(t, v.addr.Gossip, "\x0a\x00\x00\x04\x00"+strings.Repeat("x", 1024)) // an encrypted stream of 1 KiB
			}
			return many
		}},
		{"load records by UDP", strangers("gossip"), "unacceptable label", func(m *meter) int {
			record := gossip.EncodeReport([]byte{8, 0xC7}, &routing.Report{Boot: 66, Seq: 1, State: routing.StateReady})
			c := m.dial(t, "udp", v.addr.Gossip)
			defer c.Close()
			for range many {
				_, _ = c.Write(record)
				time.Sleep(time.Millisecond)
			}
			_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			_, _ = c.Read(make([]byte, 2000))
			return many
		}},
		{"requests to the peer listener, plain", strangers("peer"), agent.MsgPeerStranger, func(m *meter) int {
			for range many {
				assert.NotContains(t, m.ask(t, v.addr.Peer, post("/v1/chat/completions", "x", "x-grapevine-hop: 42\r\n")), "HTTP/1.1 200")
			}
			return many
		}},
		{"requests to the peer listener, another key", strangers("peer"), agent.MsgPeerStranger, func(m *meter) int {
			for range many {
				c := tls.Client(m.dial(t, "tcp", v.addr.Peer), stranger.ClientConfig(1, "http/1.1"))
				_, err := io.WriteString(c, post("/v1/chat/completions", "x", "x-grapevine-hop: 42\r\n"))
				assert.Error(t, err)
				_ = c.Close()
			}
			return many
		}},
		{"guesses at API keys", refusals, agent.MsgBadAPIKey, func(m *meter) int {
			for i := range many {
				assert.Contains(t, m.ask(t, v.addr.Client, post("/v1/chat/completions", fmt.Sprint("guess-", i))), "HTTP/1.1 401")
			}
			return many
		}},
		{"targets elsewhere (absolute form, CONNECT)", refusals, "no line: a client's mistake", func(m *meter) int {
			for range many {
				assert.Contains(t, m.ask(t, v.addr.Client, post("http://"+decoy.Addr().String()+"/v1/chat/completions", "the-right-key")), "HTTP/1.1 4")
				assert.Contains(t, m.ask(t, v.addr.Client, strings.Replace(post(decoy.Addr().String(), "the-right-key"), "POST", "CONNECT", 1)), "HTTP/1.1 4")
			}
			return 2 * many
		}},
		{"changes at the status listener", strangers("status"), agent.MsgStatusStranger, func(m *meter) int {
			for range many {
				for _, path := range []string{"/drain", "/mode", "/keys/install"} {
					assert.Contains(t, m.ask(t, v.addr.Status, "POST "+path+" HTTP/1.1\r\nHost: agent:8082\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36\r\n"+
						"Accept: text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8\r\nAccept-Language: en-GB,en;q=0.9\r\nX-Forwarded-For: 203.0.113.9\r\nCookie: "+
						strings.Repeat("c", 100)+"\r\nAuthorization: Bearer guess\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"), "HTTP/1.1 403")
				}
			}
			return 3 * many
		}},
	} {
		count, log, m := row.count(), len(v.log.String()), &meter{}
		tries := row.try(m)
		var counted float64
		for range 100 { // connections end a little later
			if counted = row.count() - count; counted >= float64(tries) {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		warned := 0
		for line := range strings.Lines(v.log.String()[log:]) {
			if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
				warned++
				assert.Contains(t, line, row.line, row.name)
			}
		}
		t.Logf("%-44s %3d tries, %3.0f counted, %d lines of log, %7d bytes in, %7d out", row.name, tries, counted, warned, m.in.Load(), m.out.Load())
		assert.EqualValues(t, tries, counted, row.name)
		limit := m.in.Load()
		if strings.Contains(row.name, "another key") {
			// A TLS 1.3 server's flight is longer than a client's first one. It goes over TCP to whoever asked, and to nobody else.
			limit = limit * 3 / 2
		}
		assert.LessOrEqual(t, m.out.Load(), limit, "%s: amplification", row.name)
		assert.LessOrEqual(t, warned, 2, row.name)
	}

	// Headers that name a place: a request that carries them is answered here, and nobody is called.
	m := &meter{}
	for _, h := range []string{"x-grapevine-hop: 42", "x-gateway-destination-endpoint: %s", "X-Forwarded-Host: %s", "Forwarded: host=%s", "X-Original-URL: http://%s/",
		"X-Rewrite-URL: http://%s/", "X-Upstream: http://%s", "x-envoy-original-dst-host: %s", "X-Grapevine-Target: %s", "Proxy: http://%s", "X-Http-Method-Override: CONNECT"} {
		h = strings.ReplaceAll(h, "%s", decoy.Addr().String())
		assert.Contains(t, m.ask(t, v.addr.Client, post("/v1/chat/completions", "the-right-key", h+"\r\n")), "HTTP/1.1 200", h)
	}
	t.Logf("%-44s answered here; %d connections elsewhere", "headers that name a place", came.Load())
	assert.Zero(t, came.Load())
	assert.Len(t, v.Status().Peers, 1)
	resp, err := http.Get("http://" + v.addr.Status + "/livez")
	require.NoError(t, err)
	_ = resp.Body.Close()
	assert.Equal(t, 200, resp.StatusCode)
}
