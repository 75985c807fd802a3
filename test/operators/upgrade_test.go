package operators

import (
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// firstRelease is the first commit with a whole agent of the version that CHANGELOG calls v0.1.0.
const firstRelease = "bfaccc0"

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
// load from clients that know all addresses. No request fails, and all agents see each other at every step.
func TestRollingUpgrade(t *testing.T) {
	needLong(t)
	old, current := buildOld(t, firstRelease), harness.Build(t, "./cmd/grapevine")
	s := harness.New(t)
	key := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32)))
	var engines, join []string
	for i := range 3 {
		engines = append(engines, s.FakeEngine(i+1, "-speed", "4").URL)
		join = append(join, s.Addr(i+1, harness.GossipPort))
	}
	start := func(i int, program string) *harness.Agent {
		n := i + 1
		a := &harness.Agent{N: n, IP: s.IP(n), URL: "http://" + s.Addr(n, harness.ClientPort), Status: "http://" + s.Addr(n, harness.StatusPort)}
		a.Process = s.Start(fmt.Sprintf("agent%d", n), []string{
			"GRAPEVINE_LISTEN=" + s.Addr(n, harness.ClientPort), "GRAPEVINE_PEER_LISTEN=" + s.Addr(n, harness.PeerPort), "GRAPEVINE_STATUS_LISTEN=" + s.Addr(n, harness.StatusPort),
			"GRAPEVINE_GOSSIP_LISTEN=" + s.Addr(n, harness.GossipPort), "GRAPEVINE_ADVERTISE=" + s.IP(n), "GRAPEVINE_JOIN=" + strings.Join(join, ","), "GRAPEVINE_CLUSTER=upgrade",
			fmt.Sprintf("GRAPEVINE_NODE_NAME=agent%d", n), "GRAPEVINE_GOSSIP_KEY=" + key, "GRAPEVINE_ENGINE_URL=" + engines[i], "GRAPEVINE_DRAIN_TIMEOUT=30s",
		}, program, "agent")
		return a
	}
	whole := func(agents []*harness.Agent) {
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
	agents := []*harness.Agent{start(0, old), start(1, old), start(2, old)}
	whole(agents)
	load := &harness.Load{Model: harness.FakeModel, Workers: 8, Streams: 0.5, Tokens: [2]int{5, 40}, Prompt: 2000,
		Targets: func() []string { return []string{fmt.Sprintf("http://fleet.test:%d", harness.ClientPort)} }}
	load.Client.Hosts = map[string][]string{"fleet.test": harness.IPs(agents)}
	load.Run(s)
	load.WaitMore(40, time.Minute)
	for _, program := range []string{current, old} {
		for i := range agents {
			agents[i].Term(40 * time.Second)
			agents[i] = start(i, program)
			whole(agents)
			load.WaitMore(40, time.Minute)
		}
	}
	answers := load.Stop()
	failed := harness.Failures(answers)
	t.Logf("%d chats while three agents of %s were upgraded one by one and taken back: %d failed", len(answers), firstRelease, len(failed))
	assert.Empty(t, failed, "%s", harness.Describe(failed))
}
