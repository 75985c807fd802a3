package operators

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// panel is what matters here of a Grafana panel.
type panel struct {
	Title   string
	Targets []struct{ Expr string }
	Panels  []panel
}

func expressions(list []panel) (out []string) {
	for _, p := range list {
		for _, t := range p.Targets {
			out = append(out, t.Expr)
		}
		out = append(out, expressions(p.Panels)...)
	}
	return out
}

// TestDashboard: a real Prometheus scrapes a running fleet under load, and every query of the dashboard finds something
// that is a number.
func TestDashboard(t *testing.T) {
	longOnly(t)
	prometheus, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("prometheus is not here: apt-get install prometheus")
	}
	b, err := os.ReadFile("../../deploy/grafana/grapevine.json")
	require.NoError(t, err)
	var board struct{ Panels []panel }
	require.NoError(t, json.Unmarshal(b, &board))
	list := expressions(board.Panels)
	require.Greater(t, len(list), 15)
	keda, err := os.ReadFile("../../deploy/prometheus/keda.yaml")
	require.NoError(t, err)
	triggers := regexp.MustCompile(`(?m)^ *query: (.*)$`).FindAllStringSubmatch(string(keda), -1)
	require.Len(t, triggers, 2)
	for _, m := range triggers {
		list = append(list, strings.ReplaceAll(m[1], "[5m]", "[$__rate_interval]"))
	}

	f := startFleet(t, 3, 3, nil)
	dir := t.TempDir()
	var targets []string
	for _, a := range f.agents {
		targets = append(targets, fmt.Sprintf("%q", a.Addresses().Status))
	}
	config := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, "scrape_configs:\n- job_name: llm\n  scrape_interval: 1s\n  static_configs: [ { targets: [%s] } ]\n", strings.Join(targets, ", ")), 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	cmd := exec.CommandContext(t.Context(), prometheus, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr, "--log.level=error")
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })

	var wg sync.WaitGroup
	wg.Go(func() { play(t, f, hotTrace(15*time.Second, []float64{6, 2, 2}, 3), 9<<20) })
	time.Sleep(12 * time.Second)
	for _, expr := range list {
		q := strings.NewReplacer("$__rate_interval", "10s", "$job", "llm").Replace(expr)
		res, err := http.Get("http://" + addr + "/api/v1/query?query=" + url.QueryEscape(q))
		require.NoError(t, err)
		var answer struct {
			Status, Error string
			Data          struct {
				Result []struct{ Value [2]any }
			}
		}
		require.NoError(t, json.NewDecoder(res.Body).Decode(&answer))
		_ = res.Body.Close()
		if !assert.Equal(t, "success", answer.Status, "%s: %s", expr, answer.Error) || !assert.NotEmpty(t, answer.Data.Result, expr) {
			continue
		}
		number := false
		for _, r := range answer.Data.Result {
			var x float64
			_, err := fmt.Sscan(fmt.Sprint(r.Value[1]), &x)
			number = number || err == nil && !math.IsNaN(x)
		}
		assert.True(t, number, "%s gives no number", expr)
	}
	t.Logf("%d queries, all with an answer", len(list))
	wg.Wait()
}
