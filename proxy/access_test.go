package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// A key is checked before the body is read, goes no further, and decides tenant and class; all three ways to show one work.
func TestKeysAreCheckedAndForgotten(t *testing.T) {
	e := answers(200, okAnswer)
	var shown []string
	f := newFleet(t, []uint64{1}, func(i int, c *Config) {
		c.Authorize = func(key, _ string) (Access, bool) {
			shown = append(shown, strings.Clone(key))
			return Access{Tenant: "team", Class: 1}, key == "good"
		}
	}, e)
	for _, c := range []struct {
		header, value string
		status        int
	}{
		{"Authorization", "Bearer good", 200}, {"Authorization", "bearer good", 200}, {"X-Api-Key", "good", 200}, {"Api-Key", "good", 200},
		{"Authorization", "Bearer bad", 401}, {"Authorization", "Basic good", 401}, {"X-Other", "good", 401}, {"Authorization", "Bearer ", 401},
	} {
		req, _ := http.NewRequest("POST", "http://"+f.clients[0]+chatPath, strings.NewReader(chatBody(false)))
		req.Header.Set(c.header, c.value)
		req.Header.Set(headerTenant, "another")
		req.Header.Set(headerPriority, "1")
		resp, err := f.hc.Do(req)
		require.NoError(t, err)
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		assert.Equal(t, c.status, resp.StatusCode, "%s: %s", c.header, c.value)
		if c.status == 401 {
			assert.Contains(t, string(b), `"code":"invalid_api_key"`)
			assert.Contains(t, string(b), `"type":"authentication_error"`)
			assert.NotContains(t, string(b), "good")
			continue
		}
		h := e.last()
		for _, n := range keyHeaders {
			assert.Empty(t, h.Get(n), "the key does not go on")
		}
		assert.Empty(t, h.Get(headerTenant), "tenant and class are between agents")
	}
	assert.Equal(t, "good", shown[0])
}

// Classes: above the default only with a key that allows it or trust, below it always.
func TestClassesNeedPermission(t *testing.T) {
	for _, c := range []struct {
		trust  bool
		access *Access
		header string
		tier   string
		want   uint8
	}{
		{want: 2}, {header: "1", want: 2}, {header: "3", want: 3}, {header: "4", want: 4}, {header: "9", want: 2}, {header: "x", want: 2},
		{tier: "priority", want: 2}, {tier: "flex", want: 3}, {trust: true, header: "1", want: 1}, {trust: true, tier: "priority", want: 1},
		{access: &Access{}, header: "1", want: 2}, {access: &Access{Class: 1}, header: "1", want: 1}, {access: &Access{Class: 1}, want: 2},
		{access: &Access{Class: 3}, header: "1", want: 3}, {access: &Access{Class: 3}, want: 3},
	} {
		x := &exchange{p: &Proxy{cfg: Config{TrustPriority: c.trust}}}
		if c.access != nil {
			x.access, x.keyed = *c.access, true
		}
		if c.header != "" {
			x.header.Set(headerPriority, c.header)
		}
		x.peek.ServiceTier = c.tier
		assert.Equal(t, c.want, x.askedClass(), "%+v", c)
	}
}

// GRAPEVINE_HOSTS: names, names below, ports and case.
func TestHostPolicy(t *testing.T) {
	names := []string{"llm.example", ".svc.cluster.local", "127.0.0.1", "::1"}
	for host, ok := range map[string]bool{
		"llm.example": true, "LLM.example:8080": true, "llm.example.": true, "a.svc.cluster.local": true, "svc.cluster.local": false,
		"evil.example": false, "llm.example.evil": false, "": false, "127.0.0.1:8080": true, "[::1]:8080": true, "[::1]": true,
		"xsvc.cluster.local": false,
	} {
		assert.Equal(t, ok, hostAllowed(names, host), host)
		assert.True(t, hostAllowed(nil, host))
	}
}

// A sender that keeps its body just alive is cut; one at the pace is not.
func TestPaceOfBodies(t *testing.T) {
	now := time.Now()
	p := &pace{}
	d, set := p.next(now)
	require.True(t, set)
	assert.Equal(t, now.Add(bodyGrace), d)
	_, set = p.next(now.Add(time.Second))
	assert.False(t, set, "not again at once")
	p.n = 40
	d, _ = p.next(now.Add(29 * time.Second))
	assert.Less(t, d.Sub(now), bodyGrace+time.Second, "a byte a second buys nothing")
	p.n = 29 * 1024
	d, _ = p.next(now.Add(58 * time.Second))
	assert.Greater(t, d.Sub(now), 100*time.Second)
	p.n = 1 << 30
	d, _ = p.next(now.Add(120 * time.Second))
	assert.Equal(t, now.Add(120*time.Second+bodyTimeout), d, "silence has its own limit")
}

// A drip of one byte a second loses its connection, over HTTP/1.1 and HTTP/2, and is never told 408.
func TestSlowBodiesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, okAnswer)
		f := newFleet(t, []uint64{1}, nil, e)
		for _, h2 := range []bool{false, true} {
			pr, pw := io.Pipe()
			begin := time.Now()
			var drip sync.WaitGroup
			drip.Go(func() {
				for range 600 {
					if _, err := pw.Write([]byte(" ")); err != nil {
						return
					}
					time.Sleep(time.Second)
				}
				_ = pw.Close()
			})
			req, _ := http.NewRequest("POST", "http://"+f.clients[0]+chatPath, pr)
			req.ContentLength = 600
			resp, err := f.client(h2).Do(req)
			if err == nil {
				assert.NotEqual(t, 408, resp.StatusCode)
				assert.GreaterOrEqual(t, resp.StatusCode, 400)
				_ = resp.Body.Close()
			}
			assert.Less(t, time.Since(begin), 2*time.Minute)
			_ = pr.Close()
			drip.Wait()
		}
	})
}

// At the limit of connections one that has no request makes room; those at work stay.
func TestConnectionBudget(t *testing.T) {
	release := make(chan struct{})
	u := listenEngine(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-release
		_, _ = io.WriteString(w, okAnswer)
	}))
	tab := routing.NewTable(routing.Member{Boot: 1, Node: "n1"})
	p, err := New(Config{Table: tab, Policy: inOrder{1}, EngineURL: &url.URL{Scheme: "http", Host: u.Host}, MaxConns: 4, NoGate: true})
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := p.ClientServer(NewServer(p.ClientHandler(), nil, nil))
	go func() { _ = s.Serve(ln) }()
	t.Cleanup(func() { _ = s.Close() })
	dial := func(send string) net.Conn {
		c, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		_, _ = io.WriteString(c, send)
		return c
	}
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(chatBody(false)), chatBody(false))
	work := dial(request)
	for range 3 {
		dial("POST ")
	}
	require.Eventually(t, func() bool { return p.Inflight() == 1 }, 5*time.Second, 5*time.Millisecond)
	time.Sleep(youngest + 100*time.Millisecond)
	good := dial(request)
	require.Eventually(t, func() bool { return p.Inflight() == 2 }, 5*time.Second, 5*time.Millisecond)
	close(release)
	for _, c := range []net.Conn{work, good} {
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		assert.Equal(t, 200, resp.StatusCode)
		_ = resp.Body.Close()
	}
	assert.EqualValues(t, 1, p.Metrics().Refusals[reasonConnections])
}
