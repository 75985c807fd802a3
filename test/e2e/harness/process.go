package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Process is one that the stage started. All methods are safe for concurrent use.
type Process struct {
	Name string

	t    testing.TB
	cmd  *exec.Cmd
	out  *output
	done chan struct{} // closed when the process has been waited for
	err  error         // of Wait, valid once done is closed
}

// Start runs a program with exactly the given environment beside PATH and HOME. Its output goes to NAME.log and to memory.
func (s *Stage) Start(name string, env []string, path string, args ...string) *Process {
	s.t.Helper()
	file := s.file(name + ".log")
	p := &Process{Name: name, t: s.t, out: &output{file: file}, done: make(chan struct{})}
	p.cmd = exec.Command(path, args...)
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}, env...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.SysProcAttr = ownGroup()
	if err := p.cmd.Start(); err != nil {
		s.t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		file.Close()
		close(p.done)
	}()
	s.t.Cleanup(func() {
		p.Kill()
		if s.t.Failed() {
			s.t.Logf("last lines of %s (%s):\n%s", name, p.State(), tail(p.Log(), 25))
		}
	})
	return p
}

// Pid is the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Alive tells whether the process has not ended.
func (p *Process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// State is "running", "exit 0", "exit 2", "signal: killed", ...
func (p *Process) State() string {
	if p.Alive() {
		return "running"
	}
	var exit *exec.ExitError
	switch {
	case p.err == nil:
		return "exit 0"
	case errors.As(p.err, &exit) && exit.Exited():
		return fmt.Sprintf("exit %d", exit.ExitCode())
	}
	return p.err.Error()
}

// Signal sends one to the process itself, not to its children.
func (p *Process) Signal(sig syscall.Signal) {
	if p.Alive() {
		p.cmd.Process.Signal(sig)
	}
}

// Kill is kill -9 for the process and its children, and waits for the end. A process that has ended is left alone.
func (p *Process) Kill() {
	if p.Alive() {
		syscall.Kill(-p.Pid(), syscall.SIGKILL)
	}
	<-p.done
}

// Term sends SIGTERM and returns the state after the exit; the test fails if that takes longer than the limit.
func (p *Process) Term(limit time.Duration) string {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	return p.Wait(limit)
}

// Wait returns the state after the exit; the test fails if that takes longer than the limit.
func (p *Process) Wait(limit time.Duration) string {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(limit):
		p.t.Fatalf("%s has not exited after %v; its last lines:\n%s", p.Name, limit, tail(p.Log(), 15))
	}
	return p.State()
}

// Log is all that the process has written so far.
func (p *Process) Log() string { return p.out.String() }

// Line is the first line of the log that matches, and whether there is one.
func (p *Process) Line(re string) (string, bool) {
	r := regexp.MustCompile(re)
	for line := range strings.Lines(p.Log()) {
		if line = strings.TrimRight(line, "\n"); r.MatchString(line) {
			return line, true
		}
	}
	return "", false
}

// WaitLine waits for a line of the log that matches; the test fails if none comes.
func (p *Process) WaitLine(re string, limit time.Duration) string {
	p.t.Helper()
	var line string
	Eventually(p.t, limit, fmt.Sprintf("%s to log a line like %q", p.Name, re), func() (ok bool) {
		line, ok = p.Line(re)
		return ok
	})
	return line
}

// Eventually waits until ok; the test fails with what was waited for when the limit is over.
func Eventually(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("waited %v in vain for %s", limit, what)
		}
	}
}

// output keeps what a process writes, in a file and in memory.
type output struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	file *os.File
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.buf.Write(b)
	return o.file.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// tail is the last n lines.
func tail(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
