//go:build linux

package gossip

import (
	"context"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
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

var failed = regexp.MustCompile(`msg="member failed" node=\S+ member=\S+`)

// said reports whether an agent logged that event of a member since the marks.
func said(a *harness.Agent, marks map[*harness.Agent]int, event, member string) bool {
	return regexp.MustCompile(`msg="member ` + event + `" node=\S+ member=` + regexp.QuoteMeta(member)).MatchString(a.Log()[marks[a]:])
}

// Who is found dead where nobody is depends on the CPU time that the agents get. The pulse is how late this process itself
// was woken: if that was often enough to miss probes, nothing can be said about gossip.
type pulse struct {
	stop chan struct{}
	done chan struct{}
	late []time.Duration // beyond lateness
}

const lateness = 150 * time.Millisecond // of probes that wait 200 ms

func startPulse(t *testing.T) *pulse {
	p := &pulse{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(p.done)
		for {
			was := time.Now()
			select {
			case <-p.stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
			if d := time.Since(was) - 10*time.Millisecond; d > lateness {
				p.late = append(p.late, d)
			}
		}
	}()
	t.Cleanup(p.end)
	return p
}

func (p *pulse) end() {
	select {
	case <-p.done:
	default:
		close(p.stop)
		<-p.done
	}
}

// nobodyFailed asserts that no agent found another one dead since the marks; on a machine that is too busy it skips the
// test.
func nobodyFailed(t *testing.T, p *pulse, agents []*harness.Agent, marks map[*harness.Agent]int) {
	t.Helper()
	n := failures(agents, marks)
	judge(t, p, n == 0, "%d failed events where nobody failed", n)
}

// judge fails the test unless ok, or skips it if the machine was too busy for the question.
func judge(t *testing.T, p *pulse, ok bool, format string, args ...any) {
	t.Helper()
	if ok {
		return
	}
	p.end()
	if len(p.late) > 0 && !t.Failed() {
		t.Skipf("this machine is too busy: "+format+"; the test itself was woken late %d times, by up to %v", append(args, len(p.late), slices.Max(p.late))...)
	}
	t.Errorf(format, args...)
}

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
