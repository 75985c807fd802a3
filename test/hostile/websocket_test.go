package hostile

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// kosoku (Autobahn's cases) drives a WebSocket echo: directly, through one agent, and through two. Case by case the result must
// be the same, since an upgraded connection is passed through byte for byte. kosoku 0.1.0 must be in the path, in a Python
// environment that has websockets too. Cases 9.* (large messages) are for -long; 12.* and 13.* are about an extension.
func TestWebSocketCases(t *testing.T) {
	bin, err := exec.LookPath("kosoku")
	if err != nil {
		t.Skip("kosoku is not in the path; .ci/run hostile installs it")
	}
	echo := startEcho(t, filepath.Join(filepath.Dir(bin), "python"))
	// The engine answers upgrades by the echo, and is an engine for the rest.
	model := func(name string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.Header.Get("Upgrade") != "":
				tunnel(w, r, echo)
			case r.URL.Path == "/v1/models":
				_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"`+name+`","object":"model"}]}`)
			case r.Method == http.MethodPost:
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}`)
			default:
				http.NotFound(w, r)
			}
		})
	}
	target := startVictimAt(t, serveEngine(t, model("echo")), gossipKey('k'))
	entry := startVictimAt(t, serveEngine(t, model("other")), gossipKey('k'), target.addr.Gossip)
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(entry.Status().Peers, func(p peerStatus) bool { return !p.Self && slices.Contains(p.Models, "echo") })
	}, 10*time.Second, 20*time.Millisecond)

	results := map[string]map[string]string{}
	for _, way := range []struct{ name, addr string }{{"direct", echo}, {"one agent", realtime(t, target.addr.Client)}, {"two agents", realtime(t, entry.addr.Client)}} {
		out := t.TempDir()
		args := []string{"-p", "4", "-x", "12.*", "-x", "13.*", "-o", out, way.addr}
		if !*long {
			args = append([]string{"-x", "9.*"}, args...)
		}
		began := time.Now()
		said, _ := exec.Command(bin, args...).CombinedOutput()
		text, err := os.ReadFile(filepath.Join(out, "index.json"))
		require.NoError(t, err, "%s", said)
		var doc map[string]map[string]struct{ Behavior, BehaviorClose string }
		require.NoError(t, json.Unmarshal(text, &doc))
		got, count := map[string]string{}, map[string]int{}
		for _, cases := range doc {
			for id, c := range cases {
				// Both are passed: it is strict to send what came before an error back before the end, and whether the echo had
				// done so when the error came is a matter of how fast it was.
				behavior := c.Behavior
				if behavior == "NON-STRICT" {
					behavior = "OK"
				}
				got[id] = behavior + ", " + c.BehaviorClose
				count[c.Behavior]++
			}
		}
		t.Logf("%-10s %d cases in %.1f s: %v", way.name, len(got), time.Since(began).Seconds(), count)
		results[way.name] = got
	}
	require.GreaterOrEqual(t, len(results["direct"]), 240)
	for _, way := range []string{"one agent", "two agents"} {
		assert.Len(t, results[way], len(results["direct"]))
		for id, want := range results["direct"] {
			assert.Equal(t, want, results[way][id], "case %s, %s", id, way)
		}
	}
	assert.NotZero(t, entry.metric(t, `grapevine_attempts_total{target="peer"}`), "the entry agent passed on")
	assert.Zero(t, target.metric(t, `grapevine_attempts_total{target="peer"}`))
}

// startEcho returns the echo's address.
func startEcho(t *testing.T, python string) string {
	t.Helper()
	c := exec.Command(python, "testdata/echo.py")
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	port, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	return "127.0.0.1:" + strings.TrimSpace(port)
}

// tunnel passes an upgrade request and all that follows to addr.
func tunnel(w http.ResponseWriter, r *http.Request, addr string) {
	up, err := net.Dial("tcp", addr)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		_ = up.Close()
		return
	}
	r.RequestURI, r.URL.Path, r.URL.RawQuery = "", "/", ""
	r.Header.Set("Connection", "Upgrade") // net/http took it off
	if err := r.Write(up); err == nil {
		splice(c, up, rw)
	}
	_ = c.Close()
	_ = up.Close()
}

// splice copies both ways until both have ended; early is what was read of a already.
func splice(a, b net.Conn, early io.Reader) {
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(b, early); halfClose(b) })
	wg.Go(func() { _, _ = io.Copy(a, b); halfClose(a) })
	wg.Wait()
}

func halfClose(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

// realtime is a listener that sends what comes on to an agent, with the path of a request for the model "echo".
func realtime(t *testing.T, agent string) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				br := bufio.NewReader(c)
				if _, err := br.ReadString('\n'); err != nil {
					return
				}
				up, err := net.Dial("tcp", agent)
				if err != nil {
					return
				}
				defer up.Close()
				if _, err := io.WriteString(up, "GET /v1/realtime?model=echo HTTP/1.1\r\n"); err == nil {
					splice(c, up, br)
				}
			}()
		}
	}()
	return ln.Addr().String()
}
