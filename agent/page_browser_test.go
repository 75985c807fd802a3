package agent

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	browser = flag.String("browser", "", "path of a Chromium in which the page is opened; screenshots go to -outputdir with -artifacts")
	axeFile = flag.String("axe", "", "axe.min.js of npm axe-core, to look for what keeps people out")
)

// fleetConsole is a console whose status has n replicas in all states, n pages of picks, and warnings.
func fleetConsole(n int) *console {
	rnd := rand.New(rand.NewPCG(1, uint64(n)))
	s := Status{Node: "replica-0.a1b2c3d4", State: "ready", Ready: true, Policy: "auto", Mode: ModeOn, Version: "0.1.0", UptimeMS: 7.2e6,
		Warnings: []string{"running without a key: anybody who reaches the gossip and peer ports can join and read prompts"}}
	s.Engine = EngineStatus{Kind: "vllm", Version: "0.11.0", URL: "http://127.0.0.1:8000", Health: "healthy", Models: []string{"demo-8b"}}
	s.GPU.Why = "no driver library on this host"
	for i := range n {
		p := PeerStatus{Node: fmt.Sprintf("replica-%d.%08x", i, i), Self: i == 0, State: "ready", Address: fmt.Sprintf("10.0.%d.%d:8081", i/250, i%250), Zone: "zone-" + string(rune('a'+i%3)),
			Engine: "vllm", Running: routing.Some(rnd.IntN(64)), Waiting: routing.Some(rnd.IntN(5)), Held: routing.Some(rnd.IntN(2)), KVUsage: routing.Some(rnd.Float64()), GPUMemoryUsage: routing.Some(0.9),
			PendingTokens: routing.Some(rnd.IntN(9000)), PredictedTTFTMS: routing.Some(float64(rnd.IntN(900))), AgeMS: routing.Some(int64(rnd.IntN(400))), InflightFromHere: rnd.IntN(4), Flags: []string{}}
		switch i % 17 {
		case 2:
			p.State, p.Why, p.Running, p.KVUsage = "ejected", "3 hard failures in a row", routing.Opt[int]{}, routing.Opt[float64]{}
		case 5:
			p.State, p.Why = "draining", "its agent says so"
		case 11:
			p.State, p.Why = "starting", "engine is not up"
		}
		s.Peers = append(s.Peers, p)
	}
	var picks []proxy.PickRecord
	for i := range 60 {
		p := s.Peers[rnd.IntN(len(s.Peers))]
		picks = append(picks, proxy.PickRecord{At: time.Unix(1.8e9, 0).Add(-time.Duration(i) * 300 * time.Millisecond), ID: fmt.Sprintf("gv-%016x", rnd.Uint64()), Role: "entry", Model: "demo-8b",
			PromptTokens: rnd.IntN(4000), Outcome: "ok", Status: 200, TTFTMS: float64(20 + rnd.IntN(900)), Attempts: []proxy.PickAttempt{{Node: p.Node, Reason: routing.ReasonAsked,
				ScoreMS: float64(rnd.IntN(900)), RunnerUp: s.Peers[0].Node, RunnerUpMS: 950, Asked: 3, Answered: 3, Result: "ok"}}})
	}
	c := testConsole()
	c.every = 200 * time.Millisecond
	c.status = func() Status { s.UptimeMS += 1000; return s }
	c.picks = func(string) any { return picks }
	return c
}

// TestPageShowsTheFleet: the page as it comes from the server has every replica with its state in words, at any size, and
// stays small.
func TestPageShowsTheFleet(t *testing.T) {
	for _, n := range []int{1, 3, 30, 300} {
		w := httptest.NewRecorder()
		fleetConsole(n).handler().ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		require.Equal(t, 200, w.Code)
		html := w.Body.String()
		assert.Equal(t, n, strings.Count(html, `<li class="tile`))
		assert.Equal(t, n > crowd, strings.Contains(html, `class="map dense"`))
		assert.NotContains(t, html, "style=", "the content policy forbids it")
		assert.Less(t, len(html), 20000+n*2500)
		for i := range n {
			assert.Contains(t, html, fmt.Sprintf("replica-%d.%08x", i, i))
		}
		if n >= 3 {
			assert.Contains(t, html, "ejected: 3 hard failures in a row")
		}
		assert.Contains(t, html, "Recent picks")
		assert.Contains(t, html, "Flows from this agent")
	}
}

// chromium opens url in a browser of its own and returns what it printed.
func chromium(t *testing.T, url string, flags ...string) string {
	t.Helper()
	args := append([]string{"--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
		"--hide-scrollbars", "--user-data-dir=" + t.TempDir()}, flags...)
	cmd := exec.CommandContext(t.Context(), *browser, append(args, url)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run(), errs.String())
	return out.String()
}

// TestPageInBrowser opens the page in a real browser: three fleets, wide and as on a phone, light and dark; with its script
// it follows the server, without it the tables are all there; axe finds nothing serious.
func TestPageInBrowser(t *testing.T) {
	if *browser == "" {
		t.Skip("runs with -browser")
	}
	axe, err := os.ReadFile(*axeFile)
	if *axeFile != "" {
		require.NoError(t, err)
	}
	for _, row := range []struct {
		n, width, height int
		dark             bool
	}{{3, 1280, 1250, false}, {30, 1280, 1500, true}, {300, 1440, 1700, false}, {30, 500, 2200, false}, {300, 500, 2600, true}} {
		name := fmt.Sprintf("%d-%d", row.n, row.width)
		t.Run(name, func(t *testing.T) {
			h := fleetConsole(row.n).handler()
			// The same page without its script, so that it stands still, and with axe where asked for.
			still := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				rec := httptest.NewRecorder()
				switch r.URL.Path {
				case "/axe.js":
					w.Header().Set("Content-Type", "text/javascript")
					_, _ = w.Write(append(axe, []byte(`
;addEventListener("load", () => axe.run().then(r => { const p = document.createElement("script"); p.type = "application/json"; p.id = "axe";
 p.textContent = JSON.stringify(r.violations.map(v => ({id: v.id, impact: v.impact, help: v.help, nodes: v.nodes.map(n => n.target.join(" ")).slice(0, 5)}))).replaceAll("<", ""); document.body.append(p); }));`)...))
					return
				case "/", "/axe":
					path := r.URL.Path
					r.URL.Path = "/"
					h.ServeHTTP(rec, r)
					script := ""
					if path == "/axe" {
						script = `<script src="/axe.js"></script>`
					}
					w.Header().Set("Content-Type", "text/html; charset=utf-8")
					_, _ = w.Write([]byte(strings.Replace(rec.Body.String(), `<script src="page/page.js" defer></script>`, script, 1)))
					return
				}
				h.ServeHTTP(w, r)
			})
			srv := httptest.NewServer(still)
			defer srv.Close()
			shot := filepath.Join(t.ArtifactDir(), "page-"+name+".png")
			flags := []string{"--screenshot=" + shot, fmt.Sprintf("--window-size=%d,%d", row.width, row.height)}
			if row.dark {
				flags = append(flags, "--blink-settings=preferredColorScheme=0")
			}
			chromium(t, srv.URL+"/", flags...)
			st, err := os.Stat(shot)
			require.NoError(t, err)
			assert.Greater(t, st.Size(), int64(10000))
			if len(axe) > 0 {
				dom := chromium(t, srv.URL+"/axe", append(flags[1:], "--dump-dom", "--virtual-time-budget=20000")...)
				m := regexp.MustCompile(`(?s)<script type="application/json" id="axe">(.*?)</script>`).FindStringSubmatch(dom)
				require.NotNil(t, m, "axe did not run")
				var found []struct {
					ID, Impact, Help string
					Nodes            []string
				}
				require.NoError(t, json.Unmarshal([]byte(m[1]), &found))
				for _, v := range found {
					t.Logf("axe: %s %s: %s %v", v.Impact, v.ID, v.Help, v.Nodes)
					assert.NotContains(t, []string{"serious", "critical"}, v.Impact, v.ID)
				}
				t.Logf("axe: %d findings", len(found))
			}
		})
	}
	// The page as it is, but its load event waits for two seconds: that is when the browser prints it.
	h := fleetConsole(3).handler()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slow.js":
			time.Sleep(2 * time.Second)
			w.Header().Set("Content-Type", "text/javascript")
		case "/":
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, r)
			for k, v := range rec.Header() {
				w.Header()[k] = v
			}
			_, _ = w.Write(bytes.Replace(rec.Body.Bytes(), []byte("</body>"), []byte(`<script src="/slow.js" async></script></body>`), 1))
		default:
			h.ServeHTTP(w, r)
		}
	}))
	defer srv.Close()
	dom := chromium(t, srv.URL+"/", "--dump-dom")
	assert.Regexp(t, `role="status">live<`, dom[max(0, len(dom)-600):], "the script runs under the page's own content policy and follows the server")
	up := regexp.MustCompile(`up (\d+h\d+m\d+s)`).FindAllStringSubmatch(dom, -1)
	require.Len(t, up, 1, "sections are replaced, not added")
	assert.NotEqual(t, "2h0m1s", up[0][1], "the page was renewed")
}
