//go:build linux

package gossip

import (
	"context"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

var (
	long   = flag.Bool("long", false, "run everything, not only blocked UDP")
	update = flag.Bool("update", false, "write the measured figures to gossip/testdata")
)

func TestMain(m *testing.M) {
	flag.Parse()
	gossiptest.Update = update
	code := m.Run()
	harness.RemoveBinaries()
	os.Exit(code)
}

func longOnly(t *testing.T) {
	t.Helper()
	if !*long {
		t.Skip("runs with -long")
	}
}

// engines are cheap: what is tested is not how fast they are.
var engines = []string{"-decode-step", "20ms", "-slots", "16", "-prefill-rate", "20000"}

// heartbeats is how old a record may be before its replica is left out: three heartbeats with their jitter and the margin.
const heartbeats = 3800 * time.Millisecond

// failures counts what the agents logged of members found dead since the marks.
func failures(agents []*harness.Agent, marks map[*harness.Agent]int) (n int) {
	for _, a := range agents {
		n += len(failed.FindAllString(a.Log()[marks[a]:], -1))
	}
	return n
}

var failed = regexp.MustCompile(`msg="member failed" member=\S+`)

// mark remembers where the logs end.
func mark(agents []*harness.Agent) map[*harness.Agent]int {
	m := map[*harness.Agent]int{}
	for _, a := range agents {
		m[a] = len(a.Log())
	}
	return m
}

// watch reads the agents' pages for d and returns the oldest record that any had of any other.
func watch(t *testing.T, agents []*harness.Agent, d time.Duration) (oldest time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(150 * time.Millisecond) {
		for _, a := range agents {
			r, err := a.Report()
			if err != nil {
				t.Logf("%v", err)
				continue
			}
			for _, p := range r.Peers {
				if p.AgeMS != nil && p.Node != r.Node {
					oldest = max(oldest, time.Duration(*p.AgeMS*float64(time.Millisecond)))
				}
			}
		}
	}
	return oldest.Round(time.Millisecond)
}

// fresh reports whether every agent has a young record of every other.
func fresh(agents []*harness.Agent) bool {
	for _, a := range agents {
		r, err := a.Report()
		if err != nil || r.Gossip.Members != len(agents) {
			return false
		}
		young := 0
		for _, p := range r.Peers {
			if p.Node != r.Node && p.AgeMS != nil && *p.AgeMS < 1500 {
				young++
			}
		}
		if young < len(agents)-1 {
			return false
		}
	}
	return true
}

// serve sends a few chats to every agent at the same time; all must be answered. It returns how long the slowest took.
func serve(t *testing.T, agents []*harness.Agent) (longest time.Duration) {
	t.Helper()
	var c harness.Client
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, a := range agents {
		wg.Go(func() {
			for i := range 4 {
				ans := c.Do(ctx, a.URL, harness.Chat{Model: harness.FakeModel, Prompt: fmt.Sprintf("hello %s %d", a.Name, i), MaxTokens: 5, Stream: i%2 == 0})
				assert.NoError(t, ans.Err, "%s: %v", a.Name, ans)
				mu.Lock()
				longest = max(longest, ans.Total)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return longest
}

// nodeName is an agent's name in the logs of others.
func nodeName(t *testing.T, a *harness.Agent) string {
	t.Helper()
	r, err := a.Report()
	assert.NoError(t, err)
	return r.Node
}

// warned reports whether an agent says that UDP of a member is blocked, with the member and the port.
func warned(a *harness.Agent, node string) bool {
	_, page := harness.Get(a.Status + "/status")
	return strings.Contains(page, "is UDP blocked?: "+node+" (UDP port 17946")
}
