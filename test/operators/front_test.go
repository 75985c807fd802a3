package operators

import (
	"cmp"
	"fmt"
	"net/http"
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

// front is a proxy of another project before the agents, with the configuration that deploy/front has for it.
type front struct {
	name, config string
	find         func() string
	args         func(config, dir string) []string
	fix          func(config, dir string) string // what only the test needs
}

func fronts() []front {
	path := func(names ...string) func() string {
		return func() string {
			for _, n := range names {
				if p, err := exec.LookPath(n); err == nil {
					return p
				}
			}
			return ""
		}
	}
	same := func(c, _ string) string { return c }
	return []front{
		{"nginx", "nginx.conf", path("nginx", "/usr/sbin/nginx"), func(c, dir string) []string {
			return []string{"-c", c, "-p", dir, "-e", filepath.Join(dir, "error.log"), "-g", "daemon off; pid " + filepath.Join(dir, "pid") + ";"}
		}, func(c, dir string) string {
			for _, x := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
				c = strings.Replace(c, "access_log off;", "access_log off; "+x+"_temp_path "+filepath.Join(dir, x)+";", 1)
			}
			return strings.Replace(c, "worker_processes auto;", "worker_processes 1;", 1)
		}},
		{"haproxy", "haproxy.cfg", path("haproxy", "/usr/sbin/haproxy"), func(c, _ string) []string { return []string{"-f", c, "-db"} }, same},
		{"envoy", "envoy.yaml", func() string { return cmp.Or(os.Getenv("ENVOY"), path("envoy")()) }, func(c, _ string) []string {
			return []string{"-c", c, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"}
		}, same},
	}
}

// TestFronts: behind the proxies that people have, with the configurations in deploy/front, the first content comes at most
// 10 ms later than from an agent itself, and nothing that had no content yet is lost while an agent is killed.
func TestFronts(t *testing.T) {
	longOnly(t)
	for _, f := range fronts() {
		t.Run(f.name, func(t *testing.T) {
			program := f.find()
			if program == "" {
				t.Skipf("%s is not here", f.name)
			}
			s := harness.New(t)
			var urls []string
			for i := range 3 {
				urls = append(urls, s.FakeEngine(i+1, "-speed", "4").URL)
			}
			agents := s.Mesh(urls)
			dir := t.TempDir()
			b, err := os.ReadFile("../../deploy/front/" + f.config)
			require.NoError(t, err)
			text := f.fix(string(b), dir)
			for i, a := range agents {
				text = strings.ReplaceAll(text, fmt.Sprintf("10.0.0.1%d", i+1), a.IP)
			}
			// The ports of the stage instead of the usual ones.
			listen := s.Addr(9, 19080)
			for old, now := range map[string]string{
				"listen 8080;": "listen " + listen + ";", "bind :8080": "bind " + listen,
				"address: 0.0.0.0, port_value: 8080": fmt.Sprintf("address: %s, port_value: 19080", s.IP(9)),
			} {
				text = strings.ReplaceAll(text, old, now)
			}
			text = strings.NewReplacer(":8080 ", fmt.Sprintf(":%d ", harness.ClientPort), ":8080\n", fmt.Sprintf(":%d\n", harness.ClientPort), "8080 max", fmt.Sprintf("%d max", harness.ClientPort),
				"port 8082", fmt.Sprintf("port %d", harness.StatusPort), "port_value: 8080", fmt.Sprintf("port_value: %d", harness.ClientPort), "port_value: 8082", fmt.Sprintf("port_value: %d", harness.StatusPort)).Replace(text)
			config := filepath.Join(dir, f.config)
			require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
			s.Start(f.name, os.Environ(), program, f.args(config, dir)...)
			base := "http://" + listen
			harness.Eventually(t, 20*time.Second, f.name+" to answer", func() bool {
				res, err := http.Get(base + "/v1/models")
				if err != nil {
					return false
				}
				_ = res.Body.Close()
				return res.StatusCode == http.StatusOK
			})

			// First content, direct and through the front in turn, by the same agents.
			hc := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
			defer hc.CloseIdleConnections()
			var direct, through []time.Duration
			for i := range 40 {
				d, err := chatModel(t.Context(), hc, agents[i%3].URL, harness.FakeModel, 64, 5, i)
				require.NoError(t, err)
				x, err := chatModel(t.Context(), hc, base, harness.FakeModel, 64, 5, 1000+i)
				require.NoError(t, err)
				direct, through = append(direct, d), append(through, x)
			}
			later := quantile(through, 0.5) - quantile(direct, 0.5)
			t.Logf("first content, median: direct %s, through %s %s: %s later", quantile(direct, 0.5), f.name, quantile(through, 0.5), later)
			assert.LessOrEqual(t, later, 10*time.Millisecond)

			load := (&harness.Load{Model: harness.FakeModel, Workers: 12, Streams: 0.5, Tokens: [2]int{5, 40}, Prompt: 4000, Targets: func() []string { return []string{base} }}).Run(s)
			load.WaitMore(40, time.Minute)
			agents[0].Term(40 * time.Second) // a drain: nothing at all may be seen of it
			load.WaitMore(20, time.Minute)
			agents[0].Start()
			agents[0].WaitReady(20 * time.Second)
			load.WaitMore(40, time.Minute)
			killed := time.Now()
			agents[1].Kill()
			load.WaitMore(80, time.Minute)
			agents[1].Start()
			agents[1].WaitReady(20 * time.Second)
			load.WaitMore(40, time.Minute)
			answers := load.Stop()
			var lost, cut []harness.Answer
			for _, a := range harness.Failures(answers) {
				// Whose head had come through the agent that died cannot be saved by anybody behind it.
				if a.Status == http.StatusOK && a.Stream && a.Start.Add(a.Total).After(killed) {
					cut = append(cut, a)
				} else {
					lost = append(lost, a)
				}
			}
			t.Logf("%d chats, one agent stopped, one killed with -9, both started again: %d lost, %d streams cut that ran through the killed one", len(answers), len(lost), len(cut))
			assert.Empty(t, lost, "%s", harness.Describe(lost))
		})
	}
}
