package demo

import (
	"fmt"
	"strings"

	"github.com/grapevine-lb/grapevine/routing"
)

// draw prints the fleet as the first agent sees it, over what was drawn before, on a terminal only. It returns how many
// lines it drew.
func (d *show) draw(f *fleet, r *results, drawn int) int {
	if d.cfg.Out == nil || !d.cfg.Terminal {
		return 0
	}
	var b strings.Builder
	if drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\x1b[J", drawn)
	}
	sent, answered, failed := r.counts()
	mean, p50, p99 := r.summary()
	fmt.Fprintf(&b, "%d of %d requests sent, %d answered, %d failed; first token after %.0f ms (mean), %.0f (median), %.0f (p99)\n",
		sent, d.planned, answered, failed, mean, p50, p99)
	fmt.Fprintf(&b, "%-22s %-9s %8s %8s %9s %6s %8s %9s\n", "replica", "state", "running", "waiting", "pending", "KV", "age", "from 1st")
	peers := f.agents[0].Status().Peers
	for _, p := range peers {
		age := cell(p.AgeMS, "%d ms")
		if p.Self {
			age = "-"
		}
		kv := p.KVUsage
		kv.V *= 100
		fmt.Fprintf(&b, "%-22s %-9s %8s %8s %9s %6s %8s %9d\n", p.Node, p.State, cell(p.Running, "%d"), cell(p.Waiting, "%d"),
			cell(p.PendingTokens, "%d"), cell(kv, "%.0f%%"), age, p.InflightFromHere)
	}
	d.printf("%s", b.String())
	return 2 + len(peers)
}

func cell[T any](x routing.Opt[T], format string) string {
	if !x.OK {
		return "-"
	}
	return fmt.Sprintf(format, x.V)
}

// summary says what came out.
func (d *show) summary(r Result) {
	d.printf("\n%-12s %10s %10s %10s\n", "first token", "mean", "median", "p99")
	d.printf("%-12s %7.0f ms %7.0f ms %7.0f ms\n", "grapevine", r.Mean, r.P50, r.P99)
	d.printf("%-12s %7.0f ms %7.0f ms %7.0f ms\n", "round robin", r.RoundRobin.Mean, r.RoundRobin.P50, r.RoundRobin.P99)
	d.printf("%d requests, %d failed; %.0f %% forwarded by the agent where they entered; records %.0f ms old (median)\n",
		r.Requests, r.Errors, 100*r.ForwardedShare, r.ReportAgeP50)
	if d.lastErr != nil {
		d.printf("last failure: %v\n", d.lastErr)
	}
}
