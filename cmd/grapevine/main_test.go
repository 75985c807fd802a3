package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/routing"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// run runs a command as main would.
func run(environ []string, args ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	p := &process{out: &o, err: &e, environ: environ}
	code = p.main(context.Background(), args)
	return code, o.String(), e.String()
}

func TestCommands(t *testing.T) {
	for _, row := range []struct {
		env      []string
		args     []string
		code     int
		out, err string // parts
	}{
		{args: []string{"help"}, code: 0, out: "grapevine keygen"},
		{args: []string{"-h"}, code: 0, out: "grapevine demo"},
		{args: []string{"frobnicate"}, code: 2, err: `unknown command "frobnicate"`},
		{args: []string{"version"}, code: 0, out: "grapevine " + agent.Release},
		{args: []string{"version", "x"}, code: 2, err: `unexpected argument "x"`},
		{args: []string{"config", "--docs"}, code: 0, out: "| `GRAPEVINE_LISTEN` | `:8080` |"},
		{args: []string{"config", "--metrics"}, code: 0, out: "| `grapevine_ready` | gauge |"},
		{args: []string{"config", "--nonsense"}, code: 2, err: "flag provided but not defined"},
		{args: []string{"config"}, code: 2, err: "GRAPEVINE_GOSSIP_KEY: must be set"},
		{env: []string{"GRAPEVINE_GOSSIP_KEY=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}, args: []string{"config"}, code: 0, out: "GRAPEVINE_GOSSIP_KEY           ***"},
		{env: []string{"GRAPEVINE_INSECURE=true", "GRAPEVINE_POLICI=x"}, args: []string{"config"}, code: 0, err: "the nearest is GRAPEVINE_POLICY"},
		{env: []string{"GRAPEVINE_POLICY=best"}, args: nil, code: 2, err: `GRAPEVINE_POLICY="best": must be one of auto,`},
		{env: []string{"GRAPEVINE_POLICY=best"}, args: []string{"agent"}, code: 2, err: `GRAPEVINE_POLICY="best": must be one of auto,`},
		{args: []string{"demo", "--replicas", "0"}, code: 2, err: "--replicas must be 1 to 64"},
		{args: []string{"demo", "--slow", "NaN"}, code: 2, err: "--slow above 0"},
		{args: []string{"status", "--url", "127.0.0.1:9"}, code: 1, err: "no agent answers at http://127.0.0.1:9"},
		{env: []string{"GRAPEVINE_STATUS_LISTEN=nonsense"}, args: []string{"status"}, code: 2, err: `GRAPEVINE_STATUS_LISTEN="nonsense": must be host:port or :port`},
		{args: []string{"status", "--quiet", "--url", "127.0.0.1:9"}, code: 1, err: "no agent answers"},
		{args: []string{"drain", "--url", "127.0.0.1:9"}, code: 1, err: "no agent answers"},
	} {
		code, out, errOut := run(row.env, row.args...)
		assert.Equal(t, row.code, code, "%v: %s", row.args, errOut)
		assert.Contains(t, out, row.out, row.args)
		assert.Contains(t, errOut, row.err, row.args)
		if row.code == 2 && strings.HasPrefix(row.err, "GRAPEVINE_") {
			assert.Equal(t, 1, strings.Count(errOut, "\n"), "one line: %q", errOut)
		}
	}
}

func TestKeygen(t *testing.T) {
	_, a, _ := run(nil, "keygen")
	_, b, _ := run(nil, "keygen")
	assert.NotEqual(t, a, b)
	k, err := base64.StdEncoding.DecodeString(strings.TrimSpace(a))
	require.NoError(t, err)
	assert.Len(t, k, 32)
	code, _, errOut := run([]string{"GRAPEVINE_GOSSIP_KEY=" + strings.TrimSpace(a)}, "config")
	assert.Zero(t, code, errOut)
}

func TestConfigJSON(t *testing.T) {
	code, out, _ := run([]string{"GRAPEVINE_INSECURE=true"}, "config", "--json")
	require.Zero(t, code)
	var s []agent.Setting
	require.NoError(t, json.Unmarshal([]byte(out), &s))
	assert.Len(t, s, len(agent.Fields()))
}

func TestStatus(t *testing.T) {
	s := agent.Status{Node: "a.1", State: "ready", Warnings: []string{"look"}, Peers: []agent.PeerStatus{
		{Node: "a.1", Self: true, State: "ready", Running: routing.Some(3)},
		{Node: "b.2", State: "suspect", AgeMS: routing.Some[int64](12)},
	}}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _ = json.NewEncoder(w).Encode(s) }))
	defer srv.Close()
	code, out, errOut := run(nil, "status", "--url", srv.URL)
	require.Zero(t, code, errOut)
	assert.Contains(t, out, "warning: look")
	assert.Contains(t, out, "a.1 *    ready          3        -     -")
	assert.Contains(t, out, "12 ms")
	assert.NotContains(t, out, "\x1b", "no colours but on a terminal")
	var b bytes.Buffer
	printStatus(&b, &s, true)
	assert.Contains(t, b.String(), "\x1b[31msuspect\x1b[0m")
	code, out, _ = run(nil, "status", "--json", "--url", strings.TrimPrefix(srv.URL, "http://"))
	require.Zero(t, code)
	var back agent.Status
	require.NoError(t, json.Unmarshal([]byte(out), &back))
	assert.Equal(t, s.Node, back.Node)
}

func TestDrain(t *testing.T) {
	var got []string
	release := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Method+" "+r.URL.Path+r.Header.Get("Authorization"))
		if r.URL.Path == "/drained" {
			<-release
			_, _ = w.Write([]byte("drained\n"))
			return
		}
		w.WriteHeader(http.StatusAccepted)
		_, _ = w.Write([]byte("draining\n"))
	}))
	defer srv.Close()
	code, out, errOut := run([]string{"GRAPEVINE_STATUS_TOKEN=t"}, "drain", "--no-wait", "--url", srv.URL)
	assert.Zero(t, code, errOut)
	assert.Equal(t, "draining\n", out)
	time.AfterFunc(50*time.Millisecond, func() { close(release) })
	code, out, _ = run(nil, "drain", "--url", srv.URL)
	assert.Zero(t, code)
	assert.Equal(t, "draining\ndrained\n", out)
	assert.Equal(t, []string{"POST /drain", "POST /drain", "GET /drained"}, got, "no token on this host")
}

func TestStatusURLFromEnvironment(t *testing.T) {
	for listen, want := range map[string]string{"": "http://127.0.0.1:8082", ":9000": "http://127.0.0.1:9000", "0.0.0.0:1": "http://127.0.0.1:1", "10.0.0.5:2": "http://10.0.0.5:2", "[::]:3": "http://127.0.0.1:3"} {
		c, err := newConsoleClient("", []string{"GRAPEVINE_STATUS_LISTEN=" + listen})
		require.NoError(t, err)
		assert.Equal(t, want, c.base)
	}
	c, err := newConsoleClient("", []string{"GRAPEVINE_PORT_BASE=9000"})
	require.NoError(t, err)
	assert.Equal(t, "http://127.0.0.1:9002", c.base)
}
