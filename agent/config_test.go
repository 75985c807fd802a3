package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/routing"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const loopbackGossip = "GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:7946"

// testKey is base64 of 32 zero bytes.
const testKey = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="

func TestDefaults(t *testing.T) {
	c, err := ConfigFromEnv([]string{loopbackGossip})
	require.NoError(t, err)
	assert.Equal(t, ":8080", c.Listen)
	assert.Equal(t, ":8081", c.PeerListen)
	assert.Equal(t, ":8082", c.StatusListen)
	assert.Equal(t, "http://127.0.0.1:8000", c.EngineURL)
	assert.Equal(t, 300*time.Second, c.DrainTimeout)
	assert.Equal(t, Bytes(64<<20), c.MaxBody)
	assert.Empty(t, c.Warnings)
	d := DefaultConfig()
	d.GossipListen = "127.0.0.1:7946"
	require.NoError(t, d.Validate())
}

// Each row is one wrong variable and the whole line that the operator gets.
func TestWrongVariables(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	require.NoError(t, os.WriteFile(empty, []byte(" \n"), 0o600))
	short := filepath.Join(dir, "short")
	require.NoError(t, os.WriteFile(short, []byte("c2hvcnQ="), 0o600))
	missing := filepath.Join(dir, "missing")
	covered := map[string]bool{}
	for _, row := range []struct {
		env  []string // what is set besides gossip on loopback
		want string
	}{
		{[]string{"LISTEN=8080"}, `GRAPEVINE_LISTEN="8080": must be host:port or :port`},
		{[]string{"LISTEN=:99999"}, `GRAPEVINE_LISTEN=":99999": must be host:port or :port`},
		{[]string{"PEER_LISTEN=localhost"}, `GRAPEVINE_PEER_LISTEN="localhost": must be host:port or :port`},
		{[]string{"PEER_LISTEN=:8080"}, `GRAPEVINE_PEER_LISTEN=":8080": is the same as GRAPEVINE_LISTEN; each listener needs its own port`},
		{[]string{"STATUS_LISTEN=http://:1"}, `GRAPEVINE_STATUS_LISTEN="http://:1": must be host:port or :port`},
		{[]string{"GOSSIP_LISTEN=127.0.0.1"}, `GRAPEVINE_GOSSIP_LISTEN="127.0.0.1": must be host:port or :port`},
		{[]string{"GOSSIP_LISTEN=:7946"}, `GRAPEVINE_GOSSIP_KEY: must be set, as gossip listens beyond loopback (GRAPEVINE_GOSSIP_LISTEN=":7946"); make a key with "grapevine keygen", or set GRAPEVINE_INSECURE=true to run without`},
		{[]string{"PORT_BASE=70000"}, `GRAPEVINE_PORT_BASE="70000": must be a whole number from 0 to 65532`},
		{[]string{"ADVERTISE=10.0.0.1:80"}, `GRAPEVINE_ADVERTISE="10.0.0.1:80": must be a host name or IP without port`},
		{[]string{"JOIN=a,b:0x"}, `GRAPEVINE_JOIN="a,b:0x": must be comma list of host, host:port or srv+name`},
		{[]string{"CLUSTER=a b"}, `GRAPEVINE_CLUSTER="a b": must be letters, digits, - and ., at most 100`},
		{[]string{"NODE_NAME=-x"}, `GRAPEVINE_NODE_NAME="-x": must be letters, digits, - and ., at most 100`},
		{[]string{"ZONE=é"}, `GRAPEVINE_ZONE="é": must be letters, digits, - and ., at most 100`},
		{[]string{"GOSSIP_KEY=secret"}, `GRAPEVINE_GOSSIP_KEY="***": must be base64 of 32 random bytes, comma list`},
		{[]string{"GOSSIP_KEY_FILE=" + missing}, `GRAPEVINE_GOSSIP_KEY_FILE="` + missing + `": must be a file that can be read`},
		{[]string{"GOSSIP_KEY_FILE=" + empty}, `GRAPEVINE_GOSSIP_KEY_FILE="` + empty + `": is empty`},
		{[]string{"GOSSIP_KEY_FILE=" + short}, `GRAPEVINE_GOSSIP_KEY_FILE="` + short + `": must hold base64 of 32 random bytes, comma list`},
		{[]string{"GOSSIP_KEY=" + testKey, "GOSSIP_KEY_FILE=" + short}, `GRAPEVINE_GOSSIP_KEY_FILE="` + short + `": must not be set together with GRAPEVINE_GOSSIP_KEY`},
		{[]string{"GOSSIP_PROFILE=fast"}, `GRAPEVINE_GOSSIP_PROFILE="fast": must be one of lan, large, wan`},
		{[]string{"INSECURE=ja"}, `GRAPEVINE_INSECURE="ja": must be true or false`},
		{[]string{"ENGINE_URL=localhost:8000"}, `GRAPEVINE_ENGINE_URL="localhost:8000": must be http://, https:// or unix:///path`},
		{[]string{"ENGINE_KIND=vLLM"}, `GRAPEVINE_ENGINE_KIND="vLLM": must be one of auto, vllm, sglang, llamacpp, lmdeploy, tgi, tei, trtllm, triton, dynamo, nim, infinity, ollama, openai`},
		{[]string{"ENGINE_METRICS=speed"}, `GRAPEVINE_ENGINE_METRICS="speed": must be entries such as running = my_running, separated by semicolons`},
		{[]string{"ENGINE_METRICS_URL=metrics"}, `GRAPEVINE_ENGINE_METRICS_URL="metrics": must be http:// or https:// URL, a path such as /metrics, or off`},
		{[]string{"ENGINE_API_KEY_FILE=" + missing}, `GRAPEVINE_ENGINE_API_KEY_FILE="` + missing + `": must be a file that can be read`},
		{[]string{"GPU_DEVICES=first"}, `GRAPEVINE_GPU_DEVICES="first": must be all, none, or comma list of indexes such as 0, slices such as 0:1, and UUIDs`},
		{[]string{"POLICY=fastest"}, `GRAPEVINE_POLICY="fastest": must be one of auto, p2c, round_robin, weighted_round_robin, random, least_requests, least_tokens, ewma, consistent_hash, local`},
		{[]string{"AFFINITY=yes"}, `GRAPEVINE_AFFINITY="yes": must be one of auto, off, session, prefix`},
		{[]string{"WEIGHT=NaN"}, `GRAPEVINE_WEIGHT="NaN": must be a number from 0.004 to 255`},
		{[]string{"WEIGHT=0"}, `GRAPEVINE_WEIGHT="0": must be a number from 0.004 to 255`},
		{[]string{"MAX_INFLIGHT=many"}, `GRAPEVINE_MAX_INFLIGHT="many": must be a whole number from 1 to 1000000`},
		{[]string{"MAX_CONNECTIONS=0"}, `GRAPEVINE_MAX_CONNECTIONS="0": must be a whole number from 1 to 1000000`},
		{[]string{"ACCESS_LOG=all"}, `GRAPEVINE_ACCESS_LOG="all": must be a number from 0 to 1`},
		{[]string{"HOSTS=a b"}, `GRAPEVINE_HOSTS="a b": must be comma list of host names without port, .name for all below`},
		{[]string{"QUEUE_LIMIT=-1"}, `GRAPEVINE_QUEUE_LIMIT="-1": must be a whole number from 0 to 1000000`},
		{[]string{"QUEUE_TIMEOUT=30"}, `GRAPEVINE_QUEUE_TIMEOUT="30": must be a duration such as 1.5s or 2m, from 100ms to 1h`},
		{[]string{"FIRST_BYTE_TIMEOUT=0s"}, `GRAPEVINE_FIRST_BYTE_TIMEOUT="0s": must be a duration such as 1.5s or 2m, from 100ms to 24h`},
		{[]string{"IDLE_TIMEOUT=-1s"}, `GRAPEVINE_IDLE_TIMEOUT="-1s": must be a duration such as 1.5s or 2m, from 100ms to 24h`},
		{[]string{"RETRY_BUDGET=20%"}, `GRAPEVINE_RETRY_BUDGET="20%": must be a number from 0 to 1`},
		{[]string{"GATE=on"}, `GRAPEVINE_GATE="on": must be one of auto, off`},
		{[]string{"CONTINUE=on"}, `GRAPEVINE_CONTINUE="on": must be one of auto, off`},
		{[]string{"CLASSES=A B"}, `GRAPEVINE_CLASSES="A B": must be comma list of neighbours among priority, default, flex, batch`},
		{[]string{"TRUST_GATEWAY=10.0.0.0/8,10.1.2.3/8"}, `GRAPEVINE_TRUST_GATEWAY="10.0.0.0/8,10.1.2.3/8": must be comma list of IP addresses and networks such as 10.0.0.0/8`},
		{[]string{"TRUST_GATEWAY=gateway"}, `GRAPEVINE_TRUST_GATEWAY="gateway": must be comma list of IP addresses and networks such as 10.0.0.0/8`},
		{[]string{"TRUST_PRIORITY=2"}, `GRAPEVINE_TRUST_PRIORITY="2": must be true or false`},
		{[]string{"MODE=off"}, `GRAPEVINE_MODE="off": must be one of on, shadow`},
		{[]string{"ALLOW_PATHS=v1"}, `GRAPEVINE_ALLOW_PATHS="v1": must be comma list of paths that start with /, * only at the end`},
		{[]string{"MAX_BODY=1TB"}, `GRAPEVINE_MAX_BODY="1TB": must be a size such as 64MiB, from 1KiB to 16GiB`},
		{[]string{"MODEL_ALIASES=x"}, `GRAPEVINE_MODEL_ALIASES="x": must be comma list of alias=model`},
		{[]string{"API_KEYS_FILE=" + dir}, `GRAPEVINE_API_KEYS_FILE="` + dir + `": must be a file that can be read`},
		{[]string{"DRAIN_TIMEOUT=forever"}, `GRAPEVINE_DRAIN_TIMEOUT="forever": must be a duration such as 1.5s or 2m, from 0s to 24h`},
		{[]string{"TLS_CERT_FILE=" + short}, `GRAPEVINE_TLS_KEY_FILE: must be set, as GRAPEVINE_TLS_CERT_FILE is`},
		{[]string{"TLS_KEY_FILE=" + short}, `GRAPEVINE_TLS_CERT_FILE: must be set, as GRAPEVINE_TLS_KEY_FILE is`},
		{[]string{"PEER_TLS_CERT_FILE=" + short, "PEER_TLS_KEY_FILE=" + short}, `GRAPEVINE_PEER_TLS_CA_FILE: must be set, as GRAPEVINE_PEER_TLS_CERT_FILE is`},
		{[]string{"PEER_TLS_KEY_FILE=" + missing}, `GRAPEVINE_PEER_TLS_KEY_FILE="` + missing + `": must be a file that can be read`},
		{[]string{"PEER_TLS_CA_FILE=" + missing}, `GRAPEVINE_PEER_TLS_CA_FILE="` + missing + `": must be a file that can be read`},
		{[]string{"STATUS_TOKEN_FILE=" + missing}, `GRAPEVINE_STATUS_TOKEN_FILE="` + missing + `": must be a file that can be read`},
		{[]string{"LOG_LEVEL=verbose"}, `GRAPEVINE_LOG_LEVEL="verbose": must be one of debug, info, warn, error`},
		{[]string{"LOG_FORMAT=xml"}, `GRAPEVINE_LOG_FORMAT="xml": must be one of text, json`},
		{[]string{"ENGINE_URL=http://u:pw@x:y"}, `GRAPEVINE_ENGINE_URL="http://u:***@x:y": must be http://, https:// or unix:///path`},
	} {
		environ := []string{loopbackGossip}
		for _, v := range row.env {
			environ = append(environ, Prefix+v)
			covered[Prefix+v[:strings.Index(v, "=")]] = true
		}
		_, err := ConfigFromEnv(environ)
		require.Error(t, err, row.env)
		assert.Equal(t, row.want, err.Error(), row.env)
		assert.NotContains(t, err.Error(), "secret")
	}
	free := map[string]bool{"GRAPEVINE_ENGINE_API_KEY": true, "GRAPEVINE_STATUS_TOKEN": true}
	for _, f := range Fields() {
		assert.True(t, covered[f.Variable] || free[f.Variable], "no row for %s", f.Variable)
	}
}

func TestManyWrongVariablesAreAllNamed(t *testing.T) {
	_, err := ConfigFromEnv([]string{"GRAPEVINE_POLICY=x", "GRAPEVINE_LISTEN=x", "GRAPEVINE_WEIGHT=x"})
	require.Error(t, err)
	lines := strings.Split(err.Error(), "\n")
	require.Len(t, lines, 3)
	assert.Contains(t, lines[0], "GRAPEVINE_LISTEN=")
	assert.Contains(t, lines[1], "GRAPEVINE_POLICY=")
	assert.Contains(t, lines[2], "GRAPEVINE_WEIGHT=")
}

func TestRightVariables(t *testing.T) {
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	require.NoError(t, os.WriteFile(keys, []byte(testKey+"\n"+testKey+"\n"), 0o600))
	c, err := ConfigFromEnv([]string{
		"GRAPEVINE_GOSSIP_KEY_FILE=" + keys, "GRAPEVINE_JOIN= grapevine-peers:7946, srv+_gossip._tcp.x ,[::1]:7946,::1", "GRAPEVINE_ENGINE_URL=unix:///run/engine.sock",
		"GRAPEVINE_MAX_BODY=1MiB", "GRAPEVINE_DRAIN_TIMEOUT=0s", "GRAPEVINE_PORT_BASE=9000", "GRAPEVINE_STATUS_LISTEN=127.0.0.1:1", "GRAPEVINE_ZONE=",
		"CUDA_VISIBLE_DEVICES=1", "OTHER=x",
	})
	require.NoError(t, err)
	assert.Equal(t, []string{"grapevine-peers:7946", "srv+_gossip._tcp.x", "[::1]:7946", "::1"}, c.Join)
	assert.Equal(t, Bytes(1<<20), c.MaxBody)
	assert.Equal(t, []string{":9000", ":9001", "127.0.0.1:1", ":9003"}, []string{c.Listen, c.PeerListen, c.StatusListen, c.GossipListen})
	k, err := splitKeys(c.GossipKey)
	require.NoError(t, err)
	assert.Len(t, k, 2)
	assert.Equal(t, []string{"CUDA_VISIBLE_DEVICES=1"}, c.cudaEnv)
	assert.Empty(t, c.Warnings)
}

func TestUnknownVariables(t *testing.T) {
	c, err := ConfigFromEnv([]string{loopbackGossip, "GRAPEVINE_POLICIES=auto", "GRAPEVINE_OTLP_ENDPOINT=http://collector:4318",
		// What Kubernetes sets for a Service called grapevine.
		"GRAPEVINE_PORT=tcp://10.0.0.1:8080", "GRAPEVINE_SERVICE_HOST=10.0.0.1", "GRAPEVINE_SERVICE_PORT_HTTP=8080", "GRAPEVINE_PORT_8080_TCP_ADDR=10.0.0.1",
		"GRAPEVINE_PEERS_SERVICE_HOST=10.0.0.1", "GRAPEVINE_PEERS_PORT=tcp://10.0.0.1:7946"})
	require.NoError(t, err)
	assert.Equal(t, []string{
		"GRAPEVINE_OTLP_ENDPOINT is not a variable of grapevine and has no effect; traces are configured by OTEL_EXPORTER_OTLP_ENDPOINT and its like",
		"GRAPEVINE_POLICIES is not a variable of grapevine and has no effect; the nearest is GRAPEVINE_POLICY",
	}, c.Warnings)
}

func TestFieldsAreDocumented(t *testing.T) {
	for _, f := range Fields() {
		assert.True(t, strings.HasSuffix(f.Doc, "."), "%s: %q is not a sentence", f.Variable, f.Doc)
		assert.NotEmpty(t, f.rule, f.Variable)
		if strings.HasSuffix(f.Variable, "_FILE") || strings.Contains(f.Variable, "TLS") {
			assert.False(t, f.Secret, "%s names a file", f.Variable)
		}
	}
	for _, v := range []string{"GOSSIP_KEY", "ENGINE_API_KEY", "STATUS_TOKEN"} {
		assert.True(t, variableNamed(Prefix+v).Secret)
		assert.NotEmpty(t, variableNamed(Prefix+v+"_FILE").Doc, "every secret has a file")
	}
	assert.Equal(t, len(Fields())+2, strings.Count(ConfigDocs(), "\n"))
}

// The tags cannot name the other packages' lists; this test does.
func TestListsAreComplete(t *testing.T) {
	assert.Equal(t, "one of "+strings.Join(engine.Kinds(), ", "), variableNamed("GRAPEVINE_ENGINE_KIND").Allowed)
	assert.Equal(t, "one of "+strings.Join(routing.PolicyNames, ", "), variableNamed("GRAPEVINE_POLICY").Allowed)
}

func TestEffectiveMasksSecrets(t *testing.T) {
	c, err := ConfigFromEnv([]string{loopbackGossip, "GRAPEVINE_GOSSIP_KEY=" + testKey, "GRAPEVINE_ENGINE_URL=http://user:hunter2@h:1", "GRAPEVINE_STATUS_TOKEN=tok"})
	require.NoError(t, err)
	for _, s := range c.Effective() {
		assert.NotContains(t, s.Value, testKey)
		assert.NotContains(t, s.Value, "hunter2")
		switch s.Variable {
		case "GRAPEVINE_GOSSIP_KEY", "GRAPEVINE_STATUS_TOKEN":
			assert.Equal(t, Setting{s.Variable, "***", "environment"}, s)
		case "GRAPEVINE_DRAIN_TIMEOUT":
			assert.Equal(t, Setting{s.Variable, "5m0s", "default"}, s)
		}
	}
}

func TestIsLoopback(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, ":1": false, "0.0.0.0:1": false,
		"10.0.0.1:1": false, "[::ffff:127.0.0.1]:1": true, "127.0.0.1.example.com:1": false} {
		assert.Equal(t, want, isLoopback(addr), addr)
	}
}
