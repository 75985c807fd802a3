package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// The test binary is the command too: started with this variable it runs main.
const asCommand = "FAKEENGINE_TEST_RUN_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		os.Unsetenv(asCommand)
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// process is a running fakeengine.
type process struct {
	cmd              *exec.Cmd
	address, control string
	client           *http.Client
}

func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	p := &process{cmd: exec.Command(exe, append([]string{"-control", "127.0.0.1:0"}, args...)...)}
	p.cmd.Env = append(append(os.Environ(), asCommand+"=1"), env...)
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if a, ok := strings.CutPrefix(lines.Text(), "control on "); ok {
			p.control = a
		}
		if a, ok := strings.CutPrefix(lines.Text(), "listening on "); ok {
			p.address = a
			break
		}
	}
	require.NotEmpty(t, p.address, "no address printed")
	tr := &http.Transport{}
	if strings.HasPrefix(p.address, "/") {
		path := p.address
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
		p.address = "unix"
	}
	p.client = &http.Client{Transport: tr, Timeout: 30 * time.Second}
	t.Cleanup(tr.CloseIdleConnections)
	return p
}

func (p *process) chat(content string, max int) (body string, err error) {
	resp, err := p.client.Post("http://"+p.address+"/v1/chat/completions", "application/json", strings.NewReader(
		fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"stream":true}`, content, max)))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func (p *process) fault(t *testing.T, body string) {
	t.Helper()
	resp, err := http.Post("http://"+p.control+"/fault", "application/json", strings.NewReader(body))
	if err == nil { // a fault may end the process before it can answer
		_ = resp.Body.Close()
		require.Equal(t, 200, resp.StatusCode)
	}
}

// exits returns the exit status, if it comes in time.
func (p *process) exits(t *testing.T) int {
	t.Helper()
	done := make(chan struct{})
	go func() { _ = p.cmd.Wait(); close(done) }()
	select {
	case <-done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(20 * time.Second):
		t.Fatal("does not exit")
		return 0
	}
}

func TestServesAndFailsOnCommand(t *testing.T) {
	journal := filepath.Join(t.TempDir(), "journal")
	p := start(t, []string{"FAKEENGINE_DECODE_STEP=5ms", "FAKEENGINE_SLOTS=7"}, "-slots", "3", "-journal", journal)
	body, err := p.chat("hello", 5)
	require.NoError(t, err)
	assert.True(t, strings.HasSuffix(body, "data: [DONE]\n\n"))

	p.fault(t, `{"kind":"hang","pages":true,"for":"300ms"}`)
	began := time.Now()
	_, err = p.client.Get("http://" + p.address + "/health")
	require.NoError(t, err)
	assert.Greater(t, time.Since(began), 200*time.Millisecond, "hangs for a while")

	p.fault(t, `{"kind":"die","after":10}`)
	body, err = p.chat("hello", 500)
	require.Error(t, err)
	assert.Equal(t, 1+10, strings.Count(body, "data: "), "role and ten tokens")
	assert.Equal(t, 137, p.exits(t))

	b, err := os.ReadFile(journal)
	require.NoError(t, err)
	var last enginesim.Entry
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	require.Len(t, lines, 3, "start and end of the first, start of the one that died")
	require.NoError(t, json.Unmarshal([]byte(lines[2]), &last))
	assert.Equal(t, "running", last.Outcome)
}

func TestListensOnASocketFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	p := start(t, nil, "-listen", "unix:"+path, "-decode-step", "2ms")
	_, err := p.chat("hello", 5)
	require.NoError(t, err)
	p.fault(t, `{"kind":"refuse","for":"200ms"}`)
	require.Eventually(t, func() bool { _, err := net.Dial("unix", path); return err != nil }, time.Second, time.Millisecond)
	require.Eventually(t, func() bool { _, err := p.chat("hello", 5); return err == nil }, 5*time.Second, 20*time.Millisecond)
}

func TestSIGTERMAsTheEnginesDo(t *testing.T) {
	for name, c := range map[string]struct {
		dialect string
		ends    string // of the running stream
		whole   bool
	}{
		"vLLM aborts its streams":     {"vllm", `"finish_reason":"abort"`, false},
		"SGLang finishes its streams": {"sglang", `"finish_reason":"length"`, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, nil, "-dialect", c.dialect, "-decode-step", "5ms")
			type result struct {
				body string
				err  error
			}
			got := make(chan result, 1)
			go func() {
				b, err := p.chat("hello", 200)
				got <- result{b, err}
			}()
			time.Sleep(300 * time.Millisecond)
			require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
			r := <-got
			require.NoError(t, r.err, "looks like a whole answer")
			assert.Contains(t, r.body, c.ends)
			assert.Contains(t, r.body, "[DONE]")
			assert.Equal(t, c.whole, strings.Count(r.body, `"content":"`) > 195)
			assert.Equal(t, 0, p.exits(t))
		})
	}
}

func TestFlagsAndEnvironment(t *testing.T) {
	o, err := parse([]string{"-slots", "3", "-aliases", "a,b", "-kv", "5000", "-speed", "0.5"}, []string{"FAKEENGINE_SLOTS=9", "FAKEENGINE_MAX_QUEUED=12", "HOME=/"}, io.Discard)
	require.NoError(t, err)
	assert.Equal(t, 3, o.server.Params.Slots, "flags win")
	assert.Equal(t, 12, o.server.Params.MaxQueued)
	assert.Equal(t, 5000, o.server.Params.KVTokens)
	assert.InDelta(t, 0.5, o.server.Params.Speed, 0)
	assert.Equal(t, []string{"a", "b"}, o.server.Aliases)
	assert.Equal(t, "abort", o.term)
	for says, args := range map[string][]string{
		"no such flag":         {"FAKEENGINE_NONSENSE=1"},
		"FAKEENGINE_SLOTS":     {"FAKEENGINE_SLOTS=many"},
		"unknown profile":      {"FAKEENGINE_PROFILE=gpu"},
		"on-term":              {"FAKEENGINE_ON_TERM=explode"},
		"must be larger":       {"FAKEENGINE_BUDGET=5"},
		"must be positive":     {"FAKEENGINE_PREFILL_RATE=0"},
		"must not be negative": {"FAKEENGINE_MAX_QUEUED=-1"},
	} {
		_, err := parse(nil, args, io.Discard)
		require.ErrorContains(t, err, says)
	}
}
