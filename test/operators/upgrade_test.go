package operators

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// firstRelease is the first commit of the version that CHANGELOG calls v0.1.0 whose agent serves streams whole. The first with an
// agent at all, bfaccc0, half an hour older and the same on the wire, closed now and then a connection that the next exchange
// had already: streams broke under load without any upgrade.
const firstRelease = "5e4aa8a"

// buildOld builds the agent of an older commit out of the repository's history.
func buildOld(t *testing.T, commit string) string {
	t.Helper()
	dir := t.TempDir()
	archive := exec.CommandContext(t.Context(), "sh", "-c", "git archive "+commit+" | tar x -C "+dir)
	archive.Dir = harness.Root(t)
	if out, err := archive.CombinedOutput(); err != nil || !exists(filepath.Join(dir, "go.mod")) {
		t.Skipf("no history with %s here: %s", commit, out)
	}
	program := filepath.Join(dir, "grapevine-old")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./cmd/grapevine")
	build.Dir = dir
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestRollingUpgrade: three agents of the first release are replaced one by one by those of this build, and back, under
// load. No request fails, and all agents see each other at every step.
//
// The clients know all agents and heed nobody's readiness while agents of this build are ended. The first release can reset
// a connection that is made at the moment of its end, so there the clients go by readiness, as balancers do.
func TestRollingUpgrade(t *testing.T) {
	longOnly(t)
	old, current := buildOld(t, firstRelease), harness.Build(t, "./cmd/grapevine")
	s := harness.New(t)
	var engines []string
	for i := range 3 {
		engines = append(engines, s.FakeEngine(i+1, "-speed", "4").URL)
	}
	s.Binary = old
	agents := s.Mesh(engines)
	whole := func() {
		harness.Eventually(t, 30*time.Second, "all agents to see three ready replicas", func() bool {
			for _, a := range agents {
				r, err := a.Report()
				if code, _ := a.Readyz(); err != nil || code != 200 || len(r.Peers) != 3 {
					return false
				}
				for _, p := range r.Peers {
					if p.State != "ready" {
						return false
					}
				}
			}
			return true
		})
	}
	whole()
	var reckless atomic.Bool
	ready := s.Ready(agents, 50*time.Millisecond)
	load := &harness.Load{Model: harness.FakeModel, Workers: 8, Streams: 0.5, Tokens: [2]int{5, 40}, Prompt: 2000,
		Targets: func() []string {
			if reckless.Load() {
				return []string{fmt.Sprintf("http://fleet.test:%d", harness.ClientPort)}
			}
			return ready()
		}}
	load.Client.Hosts = map[string][]string{"fleet.test": harness.IPs(agents)}
	load.Run(s)
	load.WaitMore(40, time.Minute)
	for _, program := range []string{current, old} {
		reckless.Store(program == old) // then those of this build end
		s.Binary = program
		for _, a := range agents {
			assert.Equal(t, "exit 0", a.Term(40*time.Second))
			a.Start()
			whole()
			load.WaitMore(40, time.Minute)
		}
	}
	answers := load.Stop()
	failed := harness.Failures(answers)
	t.Logf("%d chats while three agents of %s were upgraded one by one and taken back: %d failed", len(answers), firstRelease, len(failed))
	assert.Empty(t, failed, "%s", harness.Describe(failed))
}
