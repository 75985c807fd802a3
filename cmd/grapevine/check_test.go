package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestCheck runs the preflight against an engine that is there and one that is not, free and taken ports, names that
// resolve and one that does not. Each line of a failure names what to do.
func TestCheck(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/models":
			_, _ = w.Write([]byte(`{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","max_model_len":4096}]}`))
		case "/health":
		case "/version":
			_, _ = w.Write([]byte(`{"version":"0.11.0"}`))
		case "/metrics":
			_, _ = w.Write([]byte("vllm:num_requests_running{model_name=\"m\"} 1\nvllm:num_requests_waiting{model_name=\"m\"} 0\nvllm:kv_cache_usage_perc{model_name=\"m\"} 0.5\n"))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer engine.Close()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	base := []string{"GRAPEVINE_LISTEN=127.0.0.1:0", "GRAPEVINE_PEER_LISTEN=127.0.0.1:0", "GRAPEVINE_STATUS_LISTEN=127.0.0.1:0", "GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:0", "GRAPEVINE_GPU_DEVICES=none"}

	code, out, errOut := run(append(base, "GRAPEVINE_ENGINE_URL="+engine.URL), "check")
	assert.Zero(t, code, out+errOut)
	for _, want := range []string{"is vllm 0.11.0", "models   m (4096 tokens)", "metrics  readable: running", "tcp 127.0.0.1:0 (GRAPEVINE_LISTEN) is free", "udp 127.0.0.1:0", "GRAPEVINE_JOIN is empty"} {
		assert.Contains(t, out, want)
	}
	assert.NotContains(t, out, "fail")

	code, out, errOut = run(append(base, "GRAPEVINE_ENGINE_URL=http://127.0.0.1:9", "GRAPEVINE_LISTEN="+taken.Addr().String(), "GRAPEVINE_JOIN=nobody.invalid,127.0.0.1:9",
		"GRAPEVINE_GOSSIP_KEY="+base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{9}, 32))), "check", "--json")
	assert.Equal(t, 1, code)
	assert.Contains(t, errOut, "4 checks failed")
	var found []agent.Check
	require.NoError(t, json.Unmarshal([]byte(out), &found))
	failed := map[string]string{}
	for _, c := range found {
		if c.Level == agent.CheckFail {
			failed[c.Name] = c.Text
			assert.NotEmpty(t, c.Remedy, c.Name)
		}
		assert.NotContains(t, c.Text+c.Remedy, "\n")
	}
	assert.Contains(t, failed["engine"], "refused")
	assert.Contains(t, failed["port"], "in use by another process")
	assert.Contains(t, failed["dns"], "nobody.invalid")
	assert.Contains(t, failed["peer"], "127.0.0.1:9 is not reachable: connect: connection refused")

	code, out, _ = run([]string{"GRAPEVINE_POLICY=best"}, "check")
	assert.Equal(t, 1, code)
	assert.Contains(t, out, "fail  config   GRAPEVINE_POLICY")
}

// TestCompletion: every shell's script names all commands; bash runs its own.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		code, out, errOut := run(nil, "completion", shell)
		require.Zero(t, code, errOut)
		for _, c := range commands() {
			assert.Contains(t, out, c.name, shell)
		}
	}
	code, _, _ := run(nil, "completion", "cmd.exe")
	assert.Equal(t, 2, code)
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash here")
	}
	_, script, _ := run(nil, "completion", "bash")
	ask := func(words string, n string) string {
		b, err := exec.CommandContext(t.Context(), bash, "-c", script+"\nCOMP_WORDS=("+words+") COMP_CWORD="+n+"; _grapevine; echo ${COMPREPLY[*]}").CombinedOutput()
		require.NoError(t, err, string(b))
		return strings.TrimSpace(string(b))
	}
	assert.Equal(t, "demo drain", ask("grapevine d", "1"))
	assert.Equal(t, "--json", ask("grapevine status --j", "2"))
	assert.Equal(t, "zsh", ask("grapevine completion z", "2"))
}
