package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// row is one line of testdata/startup.md: a cause, and what an operator and a client see.
type row struct {
	cause string
	// start brings the situation about and returns the agent under test.
	start func(s *harness.Stage) *harness.Agent
	log   string // the line that names the cause, as a regular expression
	state string // in /status
	ready int    // status of /readyz
	gets  string // what a request gets: "200", or a status and the error's code
}

// The situations in which an agent starts with something missing. Each is at once a row in testdata/startup.md, which shows
// operators the words to look for.
var startUps = []row{
	{
		cause: "no GPU driver",
		start: func(s *harness.Stage) *harness.Agent {
			s.Size(1)
			return s.Agent(1, s.FakeEngine(1).URL)
		},
		log: `GPU memory is unknown`, state: "ready", ready: 200, gets: "200",
	}, {
		cause: "no engine yet, no other member",
		start: func(s *harness.Stage) *harness.Agent {
			s.Size(1)
			return s.Agent(1, "http://"+s.Addr(1, harness.EnginePort))
		},
		log: `engine does not answer yet`, state: "starting", ready: 503, gets: "503",
	}, {
		cause: "no engine yet, another member serves",
		start: func(s *harness.Stage) *harness.Agent {
			s.Size(2)
			other := s.Agent(2, s.FakeEngine(2).URL)
			other.WaitReady(10 * time.Second)
			a := s.Agent(1, "http://"+s.Addr(1, harness.EnginePort))
			a.WaitEntry(10 * time.Second)
			return a
		},
		log: `engine does not answer yet`, state: "starting", ready: 503, gets: "200",
	}, {
		cause: "nobody to join",
		start: func(s *harness.Stage) *harness.Agent {
			return s.Size(1).Agent(1, s.FakeEngine(1).URL, harness.Env{"GRAPEVINE_JOIN": ""})
		},
		log: `no other member yet`, state: "ready", ready: 200, gets: "200",
	}, {
		cause: "join address where nobody listens",
		start: func(s *harness.Stage) *harness.Agent {
			return s.Size(2).Agent(1, s.FakeEngine(1).URL)
		},
		log: `join address unreachable`, state: "ready", ready: 200, gets: "200",
	}, {
		cause: "join name that does not resolve",
		start: func(s *harness.Stage) *harness.Agent {
			return s.Size(1).Agent(1, s.FakeEngine(1).URL, harness.Env{"GRAPEVINE_JOIN": "replicas.invalid"})
		},
		log: `join address unreachable`, state: "ready", ready: 200, gets: "200",
	},
}

// udpBlocked needs a network namespace and so has a test of its own.
var udpBlocked = row{
	cause: "UDP blocked between agents",
	start: func(s *harness.Stage) *harness.Agent {
		_, urls := fakes(s, 2)
		return s.Mesh(urls)[0]
	},
	log: `records do not arrive; is UDP blocked\?`, state: "ready", ready: 200, gets: "200",
}

// run brings the row about and returns its line of the table.
func (r row) run(t *testing.T, s *harness.Stage) string {
	a := r.start(s)
	line := a.WaitLine(r.log, 15*time.Second)
	if r.ready == http.StatusOK {
		a.WaitReady(10 * time.Second)
	}
	code, body := a.Readyz()
	assert.Equal(t, r.ready, code, "/readyz")
	rep, err := a.Report()
	require.NoError(t, err)
	assert.Equal(t, r.state, rep.State)
	assert.Equal(t, r.ready == http.StatusOK, rep.Ready)

	var client harness.Client
	defer client.Close()
	ans := client.Do(t.Context(), a.URL, harness.Chat{Model: harness.FakeModel, Prompt: "hello", MaxTokens: 4})
	gets := fmt.Sprint(ans.Status)
	assert.Equal(t, r.gets, gets, "%s", ans.Body)
	if ans.Status != http.StatusOK {
		gets += " " + strings.TrimSpace(string(ans.Body))
		assert.NotEmpty(t, ans.Header.Get("Retry-After"), "waiting helps")
		assert.NotEmpty(t, ans.Header.Get("X-Grapevine-Reason"))
	}
	return fmt.Sprintf("| %s | %s | `%s` | %d `%s` | %s |\n", r.cause, rep.State, stable(s, line), code, stable(s, strings.TrimSpace(body)), stable(s, gets))
}

// stable replaces what differs from run to run.
func stable(s *harness.Stage, text string) string {
	for _, x := range []struct{ re, with string }{
		{`time=\S+ `, ""},
		{regexp.QuoteMeta(strings.TrimSuffix(s.IP(1), "1")), "10.0.0."},
		{`\b[0-9a-f]{16}\b`, "BOOT"},
		{`\.[0-9a-f]{8}\b`, ".BOOT"},
		{`\b\d+(\.\d+)?(ms|µs|s)\b`, "TIME"},
		{`lookup (\S+)( on \S+)?: .*?("|$)`, "lookup $1: …$3"},
		{`\|`, `\|`},
	} {
		text = regexp.MustCompile(x.re).ReplaceAllString(text, x.with)
	}
	return text
}

const startUpHead = "| cause | state | log line | /readyz | a request gets |\n|---|---|---|---|---|\n"

// What an agent says and does when something is missing.
func TestStartUp(t *testing.T) {
	longOnly(t)
	var table strings.Builder
	table.WriteString(startUpHead)
	all := true
	for _, r := range startUps {
		t.Run(r.cause, func(t *testing.T) {
			if _, err := os.Stat("/dev/nvidiactl"); err == nil && r.cause == "no GPU driver" {
				all = false
				t.Skip("this machine has the driver")
			}
			table.WriteString(r.run(t, harness.New(t)))
		})
	}
	if all && !t.Failed() {
		golden(t, "startup.md", table.String())
	}
}

// Without UDP the members still see each other by TCP: the records are asked for over the peer link, and a warning says so.
func TestStartUpWithoutUDP(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, harness.Drop(fmt.Sprintf("udp dport %d", harness.GossipPort))) {
		return
	}
	golden(t, "startup-udp.md", startUpHead+udpBlocked.run(t, harness.New(t)))
}

// Ten agents started at once are ready within 3 s after their warm-up, whether gossip works or every packet of it is lost.
func TestTenAtOnce(t *testing.T) {
	longOnly(t)
	tenAtOnce(t)
}

func TestTenAtOnceWithoutGossip(t *testing.T) {
	longOnly(t)
	port := harness.GossipPort
	if harness.Isolated(t, harness.Drop(fmt.Sprintf("udp dport %d", port), fmt.Sprintf("tcp dport %d", port))) {
		tenAtOnce(t)
	}
}

func tenAtOnce(t *testing.T) {
	s := harness.New(t).Size(10)
	_, urls := fakes(s, 10)
	var agents []*harness.Agent
	for i, url := range urls {
		agents = append(agents, s.Agent(i+1, url))
	}
	stamp := func(a *harness.Agent, re string) time.Time {
		line := a.WaitLine(re, 30*time.Second)
		at, err := time.Parse(time.RFC3339Nano, strings.TrimPrefix(strings.Fields(line)[0], "time="))
		require.NoError(t, err, line)
		return at
	}
	var slowest time.Duration
	for _, a := range agents {
		ready, warm := stamp(a, `msg=ready\b`), stamp(a, `msg="warm-up request answered"`)
		slowest = max(slowest, ready.Sub(warm))
		assert.LessOrEqual(t, ready.Sub(warm), 3*time.Second, "%s", a.Name)
		code, body := a.Readyz()
		assert.Equal(t, http.StatusOK, code, body)
	}
	t.Logf("the slowest was ready %v after its warm-up", slowest)
	var client harness.Client
	defer client.Close()
	for _, a := range agents {
		ans := client.Do(t.Context(), a.URL, harness.Chat{Model: harness.FakeModel, Prompt: "hello", MaxTokens: 4, Stream: true})
		assert.NoError(t, ans.Err, "%v", ans)
	}
}

// wrong has a value for each variable that can be wrong. The others take any text.
var wrong = map[string]string{
	"LISTEN": "8080", "PEER_LISTEN": ":port", "STATUS_LISTEN": "localhost", "GOSSIP_LISTEN": ":99999", "PORT_BASE": "-1",
	"ADVERTISE": "host:80", "JOIN": "a,:7946", "CLUSTER": "two words", "NODE_NAME": "-x", "ZONE": "a/b", "GOSSIP_KEY": "c2hvcnQ=",
	"GOSSIP_KEY_FILE": "/nonexistent", "GOSSIP_PROFILE": "fast", "INSECURE": "maybe", "ENGINE_URL": "127.0.0.1:8000",
	"ENGINE_KIND": "My Engine", "ENGINE_METRICS_URL": "metrics", "ENGINE_METRICS": "waiting", "ENGINE_API_KEY_FILE": "/nonexistent",
	"POLICY": "best", "AFFINITY": "yes", "WEIGHT": "NaN", "MAX_INFLIGHT": "0", "QUEUE_LIMIT": "many", "QUEUE_TIMEOUT": "30",
	"FIRST_BYTE_TIMEOUT": "0s", "IDLE_TIMEOUT": "-1s", "RETRY_BUDGET": "20%", "GATE": "on", "CONTINUE": "on", "CLASSES": "A B",
	"TRUST_PRIORITY": "2", "TRUST_GATEWAY": "gateway", "MODE": "dry", "ALLOW_PATHS": "sleep", "MAX_BODY": "64 parsecs", "MODEL_ALIASES": "gpt",
	"API_KEYS_FILE": "/nonexistent", "DRAIN_TIMEOUT": "5 minutes", "TLS_CERT_FILE": "/nonexistent", "TLS_KEY_FILE": "/nonexistent",
	"PEER_TLS_CERT_FILE": "/nonexistent", "PEER_TLS_KEY_FILE": "/nonexistent", "PEER_TLS_CA_FILE": "/nonexistent",
	"MAX_CONNECTIONS": "0", "ACCESS_LOG": "all", "HOSTS": "a b",
	"STATUS_TOKEN_FILE": "/nonexistent", "GPU_DEVICES": "the first", "LOG_LEVEL": "loud", "LOG_FORMAT": "xml",
}

// Each wrong variable ends the agent at once with exit code 2 and one line that names it, its value and what is allowed.
func TestWrongVariables(t *testing.T) {
	binary := harness.Build(t, "./cmd/grapevine")
	var lines strings.Builder
	try := func(t *testing.T, env ...string) string {
		cmd := exec.Command(binary, "agent")
		cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
		timer := time.AfterFunc(5*time.Second, func() { cmd.Process.Kill() })
		out, err := cmd.CombinedOutput()
		timer.Stop()
		require.Error(t, err)
		require.Equal(t, 2, cmd.ProcessState.ExitCode(), "%s", out)
		text := strings.TrimSuffix(string(out), "\n")
		assert.Equal(t, 0, strings.Count(text, "\n"), "one line: %s", text)
		return text
	}
	for _, f := range agent.Fields() {
		name := strings.TrimPrefix(f.Variable, agent.Prefix)
		value, ok := wrong[name]
		if f.Allowed == "any text" && !ok {
			continue
		}
		if !assert.True(t, ok, "no wrong value for %s", f.Variable) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			line := try(t, "GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:0", f.Variable+"="+value)
			assert.Contains(t, line, f.Variable)
			if !f.Secret {
				assert.Contains(t, line, value)
			} else {
				assert.NotContains(t, line, value)
			}
			fmt.Fprintln(&lines, line)
		})
	}
	t.Run("gossip beyond loopback without a key", func(t *testing.T) {
		line := try(t)
		assert.Contains(t, line, "GRAPEVINE_GOSSIP_KEY")
		fmt.Fprintln(&lines, line)
	})
	if !t.Failed() {
		golden(t, "wrong-variables.txt", lines.String())
	}
}
