package harness

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Job is what the scripts in test/conformance do: see openai_client.py.
type Job struct {
	Bases       []string            `json:"bases"`
	Resolve     map[string][]string `json:"resolve,omitempty"`
	Model       string              `json:"model"`
	Streams     []bool              `json:"streams"`
	MaxTokens   [2]int              `json:"max_tokens"`
	Count       int                 `json:"count"` // 0: until Stop
	Concurrency int                 `json:"concurrency"`
	MaxRetries  int                 `json:"max_retries"` // both packages' default is 2
}

// Result is one chat as an official client saw it.
type Result struct {
	N       int
	Base    string
	Stream  bool
	Content string
	Finish  string  // empty: none came
	Error   string  // what the package raised; empty: nothing
	Opened  bool    // a stream's head came; the packages repeat nothing from there on
	FirstMS float64 `json:"first_ms"`
	TotalMS float64 `json:"total_ms"`
}

// Official is a running script with an official client in it.
type Official struct {
	Language string

	t     testing.TB
	cmd   *exec.Cmd
	stdin io.WriteCloser
	done  chan struct{}
	err   error
	diag  *output

	mu      sync.Mutex
	results []Result
}

// Languages for which there is an official client.
var Languages = []string{"python", "node"}

// Official starts a job with the openai package for "python" or "node". A package that is not installed yet is installed by
// test/conformance/install.sh; the test fails where that fails.
func (s *Stage) Official(language string, job Job) *Official {
	s.t.Helper()
	dir := filepath.Join(Root(s.t), "test", "conformance")
	where, err := exec.Command("bash", filepath.Join(dir, "install.sh"), language).Output()
	if err != nil {
		s.t.Fatalf("test/conformance/install.sh %s: %v", language, err)
	}
	place := strings.TrimSpace(string(where))
	var cmd *exec.Cmd
	if language == "python" {
		cmd = exec.Command(place, filepath.Join(dir, "openai_client.py"))
	} else {
		cmd = exec.Command("node", filepath.Join(dir, "openai_client.mjs"))
		cmd.Dir = place
	}
	o := &Official{Language: language, t: s.t, cmd: cmd, done: make(chan struct{}), diag: &output{file: s.file(language + ".log")}}
	cmd.SysProcAttr, cmd.Stderr = ownGroup(), o.diag
	if o.stdin, err = cmd.StdinPipe(); err != nil {
		s.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		cmd.Process.Kill()
		<-o.done
		o.diag.file.Close()
	})
	go func() {
		defer close(o.done)
		lines := bufio.NewScanner(stdout)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var r Result
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				o.err = fmt.Errorf("%w in %q", err, lines.Bytes())
				continue
			}
			o.mu.Lock()
			o.results = append(o.results, r)
			o.mu.Unlock()
		}
		if err := cmd.Wait(); err != nil && o.err == nil {
			o.err = err
		}
	}()
	line, err := json.Marshal(job)
	if err != nil {
		s.t.Fatal(err)
	}
	fmt.Fprintf(o.stdin, "%s\n", line)
	return o
}

// Count is how many results there are so far.
func (o *Official) Count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.results)
}

// WaitMore waits until n more results are there.
func (o *Official) WaitMore(n int, limit time.Duration) {
	o.t.Helper()
	from := o.Count()
	Eventually(o.t, limit, fmt.Sprintf("%d more results of the %s client", n, o.Language), func() bool { return o.Count() >= from+n })
}

// Stop lets a job without a count end after the chats under way; for every job it waits for the end and returns the results.
func (o *Official) Stop(limit time.Duration) []Result {
	o.t.Helper()
	o.stdin.Close()
	select {
	case <-o.done:
	case <-time.After(limit):
		o.t.Fatalf("the %s client has not ended after %v:\n%s", o.Language, limit, tail(o.diag.String(), 15))
	}
	if o.err != nil {
		o.t.Fatalf("the %s client: %v\n%s", o.Language, o.err, tail(o.diag.String(), 15))
	}
	return o.results
}
