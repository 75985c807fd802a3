package deploy

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// hosts are network namespaces on one bridge, each with an address and all with the same /etc/hosts: what a host, or a
// container of a Compose project, is to a process.
type hosts struct {
	t      *testing.T
	dir    string // of the programs
	prefix string
	names  []string
	file   string // /etc/hosts
}

var programDir string

// programs builds grapevine and fakeengine, once, and says in which folder they are.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "grapevine-deploy-")
	if err != nil {
		return "", err
	}
	programDir = dir
	build := exec.CommandContext(context.Background(), "go", "build", "-o", dir+"/", "./cmd/grapevine", "./test/fakeengine")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		return dir, fmt.Errorf("%w: %s", err, out)
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if programDir != "" {
		_ = os.RemoveAll(programDir)
	}
	os.Exit(code)
}

// newHosts makes a host for each name and builds the programs. It needs root.
func newHosts(t *testing.T, names ...string) *hosts {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	tool(t, "ip", "apt-get install iproute2")
	tool(t, "curl", "apt-get install curl")
	dir, err := programs()
	require.NoError(t, err)
	h := &hosts{t: t, dir: dir, prefix: fmt.Sprintf("gv%d", os.Getpid()), names: names}
	h.ip("netns", "add", h.prefix)
	t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "ip", "netns", "del", h.prefix).Run() })
	h.ip("-n", h.prefix, "link", "add", "name", "bridge0", "type", "bridge")
	h.ip("-n", h.prefix, "link", "set", "bridge0", "up")
	text := "127.0.0.1 localhost\n"
	for i, name := range names {
		ns := h.ns(name)
		h.ip("netns", "add", ns)
		t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "ip", "netns", "del", ns).Run() })
		port := fmt.Sprint("p", i)
		h.ip("-n", h.prefix, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", ns)
		h.ip("-n", h.prefix, "link", "set", port, "master", "bridge0", "up")
		h.ip("-n", ns, "link", "set", "lo", "up")
		h.ip("-n", ns, "addr", "add", h.address(name)+"/24", "dev", "eth0")
		h.ip("-n", ns, "link", "set", "eth0", "up")
		h.ip("-n", ns, "route", "add", "default", "via", "10.99.0.254")
		text += h.address(name) + " " + name + "\n"
	}
	h.file = filepath.Join(t.TempDir(), "hosts")
	require.NoError(t, os.WriteFile(h.file, []byte(text), 0o600))
	return h
}

func (h *hosts) ip(args ...string) {
	h.t.Helper()
	out, err := exec.CommandContext(h.t.Context(), "ip", args...).CombinedOutput()
	require.NoError(h.t, err, "ip %s: %s", strings.Join(args, " "), out)
}

func (h *hosts) ns(name string) string { return h.prefix + "-" + name }

func (h *hosts) address(name string) string {
	for i, n := range h.names {
		if n == name {
			return fmt.Sprintf("10.99.0.%d", i+1)
		}
	}
	h.t.Fatalf("no host %s", name)
	return ""
}

// command is a program of ours on a host, with exactly this environment.
func (h *hosts) command(host string, env []string, program string, args ...string) *exec.Cmd {
	c := exec.CommandContext(context.Background(), "ip", append([]string{"netns", "exec", h.ns(host), "unshare", "-m", "sh", "-c",
		`mount --bind "$1" /etc/hosts && shift && exec "$@"`, "sh", h.file, filepath.Join(h.dir, filepath.Base(program))}, args...)...)
	c.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	return c
}

// process is one that runs until the test ends or stop.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan error
}

// start starts a program on a host.
func (h *hosts) start(host string, env []string, program string, args ...string) *process {
	h.t.Helper()
	out := &lockedBuffer{}
	p := &process{t: h.t, cmd: h.command(host, env, program, args...), done: make(chan error, 1)}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	require.NoError(h.t, p.cmd.Start())
	go func() { p.done <- p.cmd.Wait() }()
	h.t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		if p.done != nil {
			<-p.done
		}
		if h.t.Failed() {
			h.t.Logf("%s on %s:\n%s", program, host, out.String())
		}
	})
	return p
}

// stop sends SIGTERM and returns how the process ended.
func (p *process) stop(limit time.Duration) error {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-p.done:
		p.done = nil
		return err
	case <-time.After(limit):
		p.t.Fatal("it does not end")
		return nil
	}
}

// run runs a program on a host to its end.
func (h *hosts) run(host string, env []string, program string, args ...string) (string, error) {
	c := h.command(host, env, program, args...)
	out, err := c.CombinedOutput()
	return string(out), err
}

// chat asks the agent at url, from the first host.
func (h *hosts) chat(url string) (string, error) {
	out, err := exec.CommandContext(h.t.Context(), "ip", "netns", "exec", h.ns(h.names[0]), "curl", "-s", "-f", "-m", "20", url+"/v1/chat/completions",
		"-H", "Content-Type: application/json", "-d", `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hello"}]}`).CombinedOutput()
	return string(out), err
}

// eventually waits until ok has no error.
func (h *hosts) eventually(what string, ok func() error) {
	h.t.Helper()
	var err error
	for end := time.Now().Add(40 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if err = ok(); err == nil {
			return
		}
	}
	h.t.Fatalf("%s: %v", what, err)
}

// lockedBuffer takes the output of a process.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
