package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Engine is an inference server process, real or simulated.
type Engine struct {
	*Process
	N     int
	URL   string // to give to an agent
	Addr  string // host:port, to give to a tap
	Model string
}

// FakeModel is the model that simulated engines serve unless told otherwise.
const FakeModel = "sim"

// FakeEngine starts test/fakeengine as engine n; the arguments go to it as they are.
func (s *Stage) FakeEngine(n int, args ...string) *Engine {
	s.t.Helper()
	addr := s.Addr(n, EnginePort)
	journal := filepath.Join(s.dir, fmt.Sprintf("engine%d.journal", n))
	args = append([]string{"-listen", addr, "-model", FakeModel, "-journal", journal}, args...)
	e := &Engine{N: n, URL: "http://" + addr, Addr: addr, Model: FakeModel}
	e.Process = s.Start(fmt.Sprintf("engine%d", n), nil, Build(s.t, "./test/fakeengine"), args...)
	e.waitHealthy(10 * time.Second)
	return e
}

// Fault makes a simulated engine misbehave: see test/fakeengine.
func (e *Engine) Fault(fault any) {
	e.t.Helper()
	body, err := json.Marshal(fault)
	if err != nil {
		e.t.Fatal(err)
	}
	resp, err := plain.Post(e.URL+"/fault", "application/json", bytes.NewReader(body))
	if err != nil {
		e.t.Fatalf("%s: fault %s: %v", e.Name, body, err)
	}
	resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		e.t.Fatalf("%s: fault %s: %s", e.Name, body, resp.Status)
	}
}

// LlamaModel is the name under which llama.cpp's servers offer Gemma 3 270M.
const LlamaModel = "gemma"

// LlamaCpp starts a real llama.cpp server as engine n: two slots of 2,048 tokens, one thread, unless the arguments, which come
// behind the others, say something else.
func (s *Stage) LlamaCpp(n int, args ...string) *Engine {
	s.t.Helper()
	dir := llamaDir(s.t)
	addr := s.Addr(n, EnginePort)
	e := &Engine{N: n, URL: "http://" + addr, Addr: addr, Model: LlamaModel}
	args = append([]string{"-m", filepath.Join(dir, "gemma-3-270m-q4_k_m.gguf"), "--alias", LlamaModel,
		"--host", s.IP(n), "--port", fmt.Sprint(EnginePort),
		"-c", "4096", "--parallel", "2", "--metrics", "--slots", "--props", "-t", "1"}, args...)
	e.Process = s.Start(fmt.Sprintf("llama%d", n), nil, filepath.Join(dir, "llama-server"), args...)
	e.waitHealthy(60 * time.Second)
	return e
}

// llamaDir is where test/engines/install.sh left the server and the model. Without them the test fails, unless the
// installer has found out that there can be none here: then the test is skipped with its reason.
func llamaDir(t testing.TB) string {
	t.Helper()
	cmd := exec.Command("bash", filepath.Join(Root(t), "test", "engines", "install.sh"), "--dir", "llamacpp")
	var reason bytes.Buffer
	cmd.Stderr = &reason
	out, err := cmd.Output()
	switch {
	case err == nil:
		return strings.TrimSpace(string(out))
	case cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 3:
		t.Skipf("no llama.cpp on this machine: %s", bytes.TrimSpace(reason.Bytes()))
	}
	t.Fatalf("no llama.cpp: %v: %s", err, bytes.TrimSpace(reason.Bytes()))
	return ""
}

// waitHealthy waits for 200 on /health.
func (e *Engine) waitHealthy(limit time.Duration) {
	e.t.Helper()
	Eventually(e.t, limit, e.Name+" to be healthy", func() bool {
		if !e.Alive() {
			e.t.Fatalf("%s ended (%s):\n%s", e.Name, e.State(), tail(e.Log(), 15))
		}
		code, _ := Get(e.URL + "/health")
		return code == http.StatusOK
	})
}
