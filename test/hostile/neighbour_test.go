package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/routing"
)

type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// victim is an agent with a key, in front of a simulated engine.
type victim struct {
	*agent.Agent
	addr agent.ListenStatus
	log  *lockedLog
}

func gossipKey(b byte) string { return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, 32)) }

func startVictim(t *testing.T, key string, join ...string) *victim {
	t.Helper()
	sim, err := enginesim.NewServer(enginesim.ServerConfig{Dialect: "vllm", Model: "m", Params: enginesim.Rates(100_000, time.Millisecond, 8)})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = sim.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return startVictimAt(t, serveEngine(t, sim), key, join...)
}

func serveEngine(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

type peerStatus = agent.PeerStatus

// startVictimAt starts an agent in front of the engine at that URL.
func startVictimAt(t *testing.T, engine, key string, join ...string) *victim {
	t.Helper()
	return startVictimWith(t, func(c *agent.Config) { c.EngineURL, c.GossipKey, c.Join = engine, key, join })
}

func startVictimWith(t *testing.T, tune func(*agent.Config)) *victim {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	cfg := agent.DefaultConfig()
	cfg.Listen, cfg.PeerListen, cfg.StatusListen, cfg.GossipListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	cfg.Cluster, cfg.DrainTimeout = "hostile", time.Second
	tune(&cfg)
	v := &victim{log: &lockedLog{}}
	var err error
	v.Agent, err = agent.New(cfg, agent.Options{Logger: slog.New(slog.NewTextHandler(v.log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	require.NoError(t, err)
	done := make(chan error, 1)
	wg.Go(func() { done <- v.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	select {
	case <-v.Listening():
	case err := <-done:
		require.NoError(t, err)
	}
	v.addr = v.Addresses()
	require.Eventually(t, func() bool { ok, _ := v.Ready(); return ok }, 20*time.Second, 20*time.Millisecond, "%s", v.log)
	return v
}

func (v *victim) get(t *testing.T, path string) string {
	t.Helper()
	resp, err := http.Get("http://" + v.addr.Status + path)
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

// metric is the sum of a metric over its labels.
func (v *victim) metric(t *testing.T, name string) (sum float64) {
	t.Helper()
	for line := range strings.Lines(v.get(t, "/metrics")) {
		if rest, ok := strings.CutPrefix(line, name); ok && strings.ContainsAny(rest[:1], " {") {
			f := strings.Fields(rest)
			n, err := strconv.ParseFloat(f[len(f)-1], 64)
			require.NoError(t, err, line)
			sum += n
		}
	}
	return sum
}

// warnings counts lines of level WARN and above.
func (v *victim) warnings() int {
	return strings.Count(v.log.String(), "level=WARN") + strings.Count(v.log.String(), "level=ERROR")
}

// A stranger on the network of the agents gets nowhere, is answered with nothing, and fills no log: neither by joining with
// another key or none, nor by packets with records in them, nor at the peer listener.
func TestStranger(t *testing.T) {
	v := startVictim(t, gossipKey('k'))
	quiet := v.warnings()
	t.Run("joins with another key", func(t *testing.T) {
		for _, key := range []string{gossipKey('x'), ""} {
			keys, err := gossip.ParseKeys(key)
			require.NoError(t, err)
			n, err := gossip.New(gossip.Config{NodeName: "stranger", Member: routing.Member{Boot: 66, Addr: "127.0.0.1:1"}, Cluster: "hostile",
				Listen: "127.0.0.1:0", Join: []string{v.addr.Gossip}, Keys: keys, Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			go func() { <-ctx.Done() }()
			_ = n.Run(ctx)
			cancel()
			assert.Equal(t, 1, n.Alive(), "it sees nobody")
			n.Close()
		}
		assert.NotContains(t, v.get(t, "/status"), "stranger.") // as in its name
		assert.Len(t, v.Status().Peers, 1, "only itself")
	})
	t.Run("sends records", func(t *testing.T) {
		record := gossip.EncodeReport([]byte{8, 0xC7}, &routing.Report{Boot: 66, Seq: 1, State: routing.StateReady})
		c, err := net.Dial("udp", v.addr.Gossip)
		require.NoError(t, err)
		defer c.Close()
		for i := range 5000 {
			record[len(record)-1] = byte(i)
			_, _ = c.Write(record)
			_, _ = c.Write(record[:i%len(record)])
		}
		_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		_, err = c.Read(make([]byte, 2000))
		assert.Error(t, err, "nothing comes back: no amplification")
		assert.NotContains(t, v.get(t, "/status"), fmt.Sprintf("%016x", 66))
	})
	t.Run("comes to the peer listener", func(t *testing.T) {
		request := "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nx-grapevine-hop: 42\r\nContent-Length: 13\r\n\r\n{\"model\":\"m\"}"
		for range 50 {
			c, err := net.Dial("tcp", v.addr.Peer)
			require.NoError(t, err)
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = io.WriteString(c, request)
			b, _ := io.ReadAll(c)
			assert.NotContains(t, string(b), "HTTP/1.1 200", "plain")
			assert.Less(t, len(b), len(request))
			_ = c.Close()

			s, err := tls.Dial("tcp", v.addr.Peer, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is the stranger
			if err != nil {
				continue
			}
			_ = s.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = io.WriteString(s, request)
			b, _ = io.ReadAll(s)
			assert.Empty(t, b, "without a certificate")
			_ = s.Close()
		}
	})
	lines := v.warnings() - quiet
	t.Logf("%d lines of warning for 2 joins, 10,000 packets and 100 connections", lines)
	assert.Less(t, lines, 12)
	resp, err := http.Post("http://"+v.addr.Client+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","max_tokens":2,"messages":[{"role":"user","content":"x"}]}`))
	require.NoError(t, err)
	_ = resp.Body.Close()
	assert.Equal(t, 200, resp.StatusCode, "clients are served as before")
}

// C102: no verb on any path of the status listener changes anything when it comes from elsewhere, from a page of another
// site, under another Host, or with a guessed token.
func TestC102StatusChangesNothing(t *testing.T) {
	v := startVictim(t, gossipKey('k'))
	keys := v.get(t, "/keys")
	paths := []string{"/", "/status", "/metrics", "/drain", "/reload", "/keys", "/keys/install", "/keys/remove", "/keys/use", "/picks", "/explain", "/livez", "/readyz",
		"/engine/health", "/mode", "/debug/pprof/", "/events/x", "//drain", "/drain/", "/DRAIN", "/status/../drain"}
	for _, m := range []string{"POST", "PUT", "DELETE", "PATCH", "X"} {
		for _, p := range paths {
			for how, dress := range map[string]func(*http.Request){
				"from elsewhere, through a proxy": func(r *http.Request) { r.Header.Set("X-Forwarded-For", "203.0.113.9") },
				"from another site": func(r *http.Request) {
					r.Header.Set("Origin", "http://evil.example")
					r.Header.Set("Sec-Fetch-Site", "cross-site")
				},
				"by DNS rebinding":     func(r *http.Request) { r.Host = "evil.example:8082" },
				"with a guessed token": func(r *http.Request) { r.Header.Set("Authorization", "Bearer guess") },
			} {
				req, err := http.NewRequest(m, "http://"+v.addr.Status+p, strings.NewReader("x"))
				require.NoError(t, err)
				dress(req)
				resp, err := http.DefaultTransport.RoundTrip(req)
				require.NoError(t, err)
				_ = resp.Body.Close()
				if resp.StatusCode < 300 || resp.StatusCode >= 500 {
					assert.Fail(t, "not refused", "%s %s %s: %d", m, p, how, resp.StatusCode)
				}
			}
		}
	}
	ok, why := v.Ready()
	assert.True(t, ok, why)
	assert.Equal(t, keys, v.get(t, "/keys"))
}

// C105, and C103 for the pages: what clients say of themselves and what they ask is on no page, in no line and no record.
func TestC105NothingOfClients(t *testing.T) {
	a := startVictim(t, gossipKey('k'))
	b := startVictim(t, gossipKey('k'), a.addr.Gossip)
	const marker = "MARKERxyz"
	for i := range 20 {
		body := fmt.Sprintf(`{"model":"m","max_tokens":3,"user":"%[1]s-user","metadata":{"team":"%[1]s-team"},"messages":[{"role":"user","content":"%[1]s-prompt %[2]d"}]}`, marker, i)
		req, _ := http.NewRequest("POST", "http://"+[]string{a.addr.Client, b.addr.Client}[i%2]+"/v1/chat/completions?key="+marker+"-query", strings.NewReader(body))
		for _, h := range []string{"Authorization", "X-Api-Key", "Api-Key", "Cookie", "OpenAI-Organization", "X-Session-Id", "X-Grapevine-Tenant"} {
			req.Header.Set(h, marker+"-"+h)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		assert.Equal(t, 200, resp.StatusCode)
	}
	for _, v := range []*victim{a, b} {
		for _, p := range []string{"/", "/status", "/metrics", "/picks", "/keys"} {
			assert.NotContains(t, v.get(t, p), marker, p)
		}
		assert.NotContains(t, v.log.String(), marker)
	}
}
