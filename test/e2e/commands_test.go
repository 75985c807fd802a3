package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// how says what becomes of a command that a page for users shows. Exactly one of say, background, ci and not is set.
type how struct {
	say        string        // it is run, must end with status 0 and say this ("-": nothing in particular)
	background string        // it is started, and goes on when this page is there
	ci         string        // this part of .ci/run runs it
	not        string        // why it is not run
	env        []string      // besides the page's own, where the page assumes something
	as         string        // what is run instead, where the page has a placeholder
	limit      time.Duration // 0: 30 s
}

const agentOne = "GRAPEVINE_PORT_BASE=9000 GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:9003 GRAPEVINE_ENGINE_URL=http://127.0.0.1:8000"

var (
	first = strings.Fields(agentOne)                           // the environment of the first agent
	there = []string{"GRAPEVINE_STATUS_LISTEN=127.0.0.1:9002"} // where commands find it
)

// commands are all commands of README.md and deploy/README.md, in the order in which they are run here. Two pages may show the
// same one.
var commands = []struct {
	text string
	how  how
}{
	{`go test ./...`, how{ci: "test"}},
	{`grapevine demo --duration 15s`, how{ci: "demo"}},
	{`grapevine demo --duration 15s --slow 1`, how{ci: "demo"}},
	{`test/engines/install.sh llamacpp && go test ./test/engines -v`, how{ci: "engines_all"}},
	{`go test ./test/engines -long -v -timeout 60m`, how{ci: "engines_all"}},
	{`go test ./test/choosing -v -long -runs 1`, how{ci: "choosing"}},
	{`go run ./test/bench proxy`, how{ci: "bench_proxy"}},
	{`go test ./test/operators -run TestShadow -long`, how{ci: "operators_all"}},
	{`promtool check rules`, how{ci: "operators"}},
	{`go build -o grapevine ./cmd/grapevine`, how{say: "-", limit: 3 * time.Minute}},
	{`go run ./cmd/grapevine demo`, how{say: "round robin", limit: 3 * time.Minute}},
	{`./grapevine keygen > key`, how{say: "-"}},
	{agentOne + ` ./grapevine agent`, how{background: "http://127.0.0.1:9002/readyz"}},
	{`GRAPEVINE_PORT_BASE=9010 GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:9013 GRAPEVINE_ENGINE_URL=http://127.0.0.1:8001 GRAPEVINE_JOIN=127.0.0.1:9003 ./grapevine agent`,
		how{background: "http://127.0.0.1:9012/readyz"}},
	{`GRAPEVINE_GOSSIP_KEY_FILE=key GRAPEVINE_JOIN=replicas.example.org ./grapevine agent`, how{background: "http://127.0.0.1:8082/readyz"}},
	{`./grapevine keygen > new && ./grapevine keys install new`, how{say: "1 of 1"}},
	{`./grapevine keys`, how{say: "READ BY"}},
	{`./grapevine keys remove OLD_ID`, how{say: "1 of 1", // it is refused until the new one is sent with
		as: `for i in 1 2 3 4 5; do ./grapevine keys remove $(./grapevine keys | awk 'NR==3 { print $1 }') && exit; sleep 1; done; exit 1`}},
	{`curl http://127.0.0.1:9000/v1/chat/completions …`, how{say: `"content"`,
		as: `curl -sS http://127.0.0.1:9000/v1/chat/completions -H 'content-type: application/json' -H 'x-request-id: asked' -d '{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":3}'`}},
	{`./grapevine status --help`, how{say: "-json"}},
	{`./grapevine check`, how{say: "engine", env: []string{"GRAPEVINE_PORT_BASE=9020", "GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:9023", "GRAPEVINE_ENGINE_URL=http://127.0.0.1:8000", "GRAPEVINE_JOIN=127.0.0.1:9003"}}},
	{`./grapevine explain`, how{say: "sim", as: `./grapevine explain --model sim`, env: there}},
	{`./grapevine top`, how{not: "it wants a terminal: cmd/grapevine tests it on one"}},
	{`grapevine config`, how{say: "GRAPEVINE_PORT_BASE", env: first}},
	{`grapevine check`, how{say: "engine", env: []string{"GRAPEVINE_PORT_BASE=9020", "GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:9023", "GRAPEVINE_ENGINE_URL=http://127.0.0.1:8000", "GRAPEVINE_JOIN=127.0.0.1:9003"}}},
	{`grapevine status`, how{say: "ready", env: there}},
	{`grapevine top`, how{not: "it wants a terminal: cmd/grapevine tests it on one"}},
	{`grapevine explain req.json`, how{say: "sim", env: there,
		as: `echo '{"model":"sim","messages":[{"role":"user","content":"hi"}]}' > req.json && grapevine explain req.json`}},
	{`grapevine explain ID`, how{say: "asked", env: there, as: `grapevine explain asked`}},
	{`grapevine explain --model M`, how{say: "sim", env: there, as: `grapevine explain --model sim`}},
	{`grapevine mode shadow`, how{say: "shadow", env: there}},
	{`grapevine mode`, how{say: "shadow", env: there}},
	{`grapevine mode on`, how{say: "on", env: there}},
	{`source <(grapevine completion bash)`, how{say: "complete", as: `source <(grapevine completion bash) && complete -p grapevine`}},
	{`curl -X POST 127.0.0.1:8082/debug/flight/start`, how{say: "recording"}},
	{`curl -o gv.trace 127.0.0.1:8082/debug/flight`, how{say: "-"}},
	{`go tool trace gv.trace`, how{say: "Type: delay", as: `go tool trace -pprof=sched gv.trace > sched.pprof && go tool pprof -top sched.pprof`, limit: time.Minute}}, // it would open a browser
	{`go test ./agent/engine -run '^$' -bench Scrape`, how{say: "BenchmarkScrape", limit: 3 * time.Minute}},
	{`kubectl port-forward`, how{not: "it wants a cluster with a kubelet, which cannot be had here"}},
	{`make help`, how{say: "make"}},
}

// shown finds what a page shows: fenced blocks for the shell, lines that are indented, and code within the text that begins
// like a command. Comments behind a command and backslashes at the end of a line are taken away.
func shown(page string) (list []string) {
	fence := regexp.MustCompile("(?ms)^```sh\n(.*?)^```")
	lines := func(block string) {
		block = strings.ReplaceAll(block, "\\\n", " ")
		for line := range strings.Lines(block) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), " #")
			if line = strings.Join(strings.Fields(line), " "); line != "" && line[0] != '#' {
				list = append(list, line)
			}
		}
	}
	for _, m := range fence.FindAllStringSubmatch(page, -1) {
		lines(m[1])
	}
	page = fence.ReplaceAllString(page, "")
	page = regexp.MustCompile("(?ms)^```.*?^```").ReplaceAllString(page, "")
	for _, m := range regexp.MustCompile(`(?m)^    \S.*$`).FindAllString(page, -1) {
		if m = strings.TrimSpace(m); regexp.MustCompile(`^(go|make|curl|grapevine|\./|test/\S+\.sh) ?`).MatchString(m) {
			lines(m)
		}
	}
	for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(page, -1) {
		if regexp.MustCompile(`^(\w+=\S+ )*(\./grapevine|grapevine|go|curl|make|promtool|source|kubectl|helm|docker) `).MatchString(m[1]) {
			lines(m[1])
		}
	}
	return list
}

// TestCommandsAreKnown: whoever shows a command says here how it is tried.
func TestCommandsAreKnown(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range []string{"README.md", "deploy/README.md"} {
		b, err := os.ReadFile(filepath.Join(harness.Root(t), name))
		require.NoError(t, err)
		list := shown(string(b))
		require.Greater(t, len(list), 8, name)
		for _, text := range list {
			seen[text] = true
			if setting.MatchString(text) {
				continue
			}
			known := slices.ContainsFunc(commands, func(c struct {
				text string
				how  how
			}) bool {
				return c.text == text
			})
			assert.True(t, known, "%s shows %q: say in commands how it is tried, or why not", name, text)
		}
	}
	parts, err := exec.Command(filepath.Join(harness.Root(t), ".ci/run"), "list").Output()
	require.NoError(t, err)
	for _, c := range commands {
		assert.True(t, seen[c.text], "no page shows %q any more", c.text)
		if c.how.ci != "" {
			assert.Contains(t, strings.Fields(string(parts)), c.how.ci, "%s: no such part of .ci/run", c.text)
		}
	}
}

// setting is a line that only sets variables: it must be one that an agent takes.
var setting = regexp.MustCompile(`^GRAPEVINE_\w+='[^']*'$`)

// TestCommands runs the commands of the pages as they stand there, in a copy of the tree and a network of its own.
func TestCommands(t *testing.T) {
	longOnly(t)
	// Compiled out here, where nothing limits it; in the copy below it is found, since no path is in it.
	warm := exec.Command("bash", "-c", "go build -o /dev/null ./cmd/grapevine && go test -c -o /dev/null ./agent/engine")
	warm.Dir, warm.Env = harness.Root(t), append(os.Environ(), "GOFLAGS=-trimpath")
	out, err := warm.CombinedOutput()
	require.NoError(t, err, "%s", out)
	if !harness.Isolated(t, "table inet e2e {}") {
		return
	}
	for _, args := range []string{"addr add 192.0.2.1/24 dev lo", "route add default dev lo"} { // gossip wants an address to be reached at
		out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	s := harness.New(t)
	engine := harness.Build(t, "./test/fakeengine")
	for i := range 2 {
		s.Start(fmt.Sprintf("engine-%d", i), nil, engine, "-listen", fmt.Sprintf("127.0.0.1:%d", 8000+i), "-model", harness.FakeModel)
	}
	dir := clone(t)
	for _, c := range commands {
		h := c.how
		line := c.text
		if h.as != "" {
			line = h.as
		}
		switch {
		case h.ci != "":
			t.Logf("%s\n    by .ci/run %s", c.text, h.ci)
		case h.not != "":
			t.Logf("%s\n    not run: %s", c.text, h.not)
		case h.background != "":
			began := time.Now()
			p := s.Start(fmt.Sprintf("agent-%d", began.UnixNano()), append(h.env, "GOFLAGS=-trimpath"), "bash", "-c", "cd '"+dir+"' && exec env "+line)
			harness.Eventually(t, 40*time.Second, c.text, func() bool {
				code, _ := harness.Get(h.background)
				return code == 200 || !p.Alive()
			})
			require.True(t, p.Alive(), "%s: %s\n%s", c.text, p.State(), p.Log())
			t.Logf("%s\n    runs, ready after %s", c.text, time.Since(began).Round(10*time.Millisecond))
		default:
			out, took, err := shell(t, dir, h, line)
			if assert.NoError(t, err, "%s\n%s", line, out) && h.say != "-" {
				assert.Contains(t, out, h.say, line)
			}
			t.Logf("%s\n    %s", c.text, took)
		}
	}
	for _, name := range []string{"README.md", "deploy/README.md"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		for _, text := range shown(string(b)) {
			if setting.MatchString(text) {
				out, _, err := shell(t, dir, how{env: first}, text+" ./grapevine config")
				assert.NoError(t, err, "%s\n%s", text, out)
				assert.NotContains(t, out, "warning", text)
			}
		}
	}
}

func shell(t *testing.T, dir string, h how, line string) (string, time.Duration, error) {
	limit := h.limit
	if limit == 0 {
		limit = 30 * time.Second
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", line)
	cmd.Dir, cmd.WaitDelay = dir, 5*time.Second
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "GOFLAGS=-trimpath") // so that another copy finds the compiled packages
	cmd.Env = append(cmd.Env, h.env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	began := time.Now()
	err := cmd.Run()
	return out.String(), time.Since(began).Round(10 * time.Millisecond), err
}

// clone copies what is committed, or about to be, as a new user has it.
func clone(t *testing.T) string {
	t.Helper()
	root, dir := harness.Root(t), t.TempDir()
	cmd := exec.Command("bash", "-c", `set -o pipefail; git ls-files -co --exclude-standard -z | tar c --null --ignore-failed-read -T - | tar x -C "$0"`, dir)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}
