package engines

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/require"
)

var long = flag.Bool("long", false, "test all engines, and install what is missing; without it one short test of llama.cpp, where that is installed")

func TestMain(m *testing.M) { harness.Main(m) }

func longOnly(t *testing.T) {
	t.Helper()
	if !*long {
		t.Skip("runs with -long")
	}
}

func script(t *testing.T, name string) string {
	return filepath.Join(harness.Root(t), "test", "engines", name)
}

// installed makes sure that the engine is there. With -long it is installed if need be; where the installer finds that
// there can be none here, the test is skipped with its reason.
func installed(t *testing.T, engine string) {
	t.Helper()
	out, code := runScript(t, script(t, "install.sh"), "--dir", engine)
	if code == 1 && *long {
		out, code = runScript(t, script(t, "install.sh"), engine)
	}
	switch code {
	case 0:
	case 1:
		if *long {
			t.Fatalf("%s cannot be installed: %s", engine, out)
		}
		t.Skip(out)
	case 3:
		t.Skipf("no %s on this machine: %s", engine, out)
	default:
		t.Fatalf("install.sh %s: exit %d: %s", engine, code, out)
	}
}

func runScript(t *testing.T, args ...string) (stderr string, code int) {
	t.Helper()
	cmd := exec.Command("bash", args...)
	var b bytes.Buffer
	cmd.Stderr = &b
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return strings.TrimSpace(b.String()), cmd.ProcessState.ExitCode()
}

// server is an engine that can be started again at its address.
type server struct {
	*harness.Process
	t     *testing.T
	s     *harness.Stage
	kind  string // as install.sh and serve.sh call it
	model string
	addr  string
	url   string
	args  []string
	limit time.Duration // for its start
}

// newServer prepares an engine as number n of the stage; start starts it.
func newServer(t *testing.T, s *harness.Stage, n int, kind, model string, limit time.Duration, args ...string) *server {
	t.Helper()
	installed(t, kind)
	addr := s.Addr(n, harness.EnginePort)
	return &server{t: t, s: s, kind: kind, model: model, addr: addr, url: "http://" + addr, args: args, limit: limit}
}

func (e *server) start() {
	e.t.Helper()
	env := []string{"XDG_CACHE_HOME=" + os.Getenv("XDG_CACHE_HOME"), "TMPDIR=" + os.TempDir()}
	e.Process = e.s.Start(e.kind, env, "bash", append([]string{script(e.t, "serve.sh"), e.kind, e.addr}, e.args...)...)
}

// alive fails the test if the engine has ended by itself.
func (e *server) alive() {
	e.t.Helper()
	if !e.Alive() {
		log := strings.Split(e.Log(), "\n")
		e.t.Fatalf("%s ended (%s):\n%s", e.kind, e.State(), strings.Join(log[max(0, len(log)-20):], "\n"))
	}
}
