package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/routing"
)

// runStatus prints what an agent knows. It fails (exit 1) if no agent answers; a replica that is not ready is no failure.
func runStatus(ctx context.Context, p *process, args []string) error {
	f := p.flags("status")
	url := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	asJSON := f.Bool("json", false, "print the agent's JSON as it is")
	quiet := f.Bool("quiet", false, "print nothing; fail unless the replica is ready")
	if err := p.parse(f, args); err != nil {
		return err
	}
	c, err := newConsoleClient(*url, p.environ)
	if err != nil {
		return err
	}
	if *quiet {
		_, err := c.do(ctx, http.MethodGet, "/readyz", 5*time.Second)
		return err
	}
	b, err := c.do(ctx, http.MethodGet, "/status", 5*time.Second)
	if err != nil {
		return err
	}
	if *asJSON {
		_, err = p.out.Write(b)
		return err
	}
	var s agent.Status
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("%s/status: %w", c.base, err)
	}
	printStatus(p.out, &s, p.terminal)
	return nil
}

// printStatus writes the status for a human, replicas as a table.
func printStatus(w io.Writer, s *agent.Status, colour bool) {
	line := s.State
	if s.Why != "" {
		line += ": " + s.Why
	}
	fmt.Fprintf(w, "%s  %s  (grapevine %s, up %s)\n", s.Node, paint(line, s.State, colour), s.Version, (time.Duration(s.UptimeMS) * time.Millisecond).Truncate(time.Second))
	for _, x := range s.Warnings {
		fmt.Fprintln(w, paint("warning: "+x, "warming", colour))
	}
	fmt.Fprintf(w, "engine   %s %s at %s: %s %s  models: %s\n", s.Engine.Kind, s.Engine.Version, s.Engine.URL, s.Engine.Health, s.Engine.Detail, strings.Join(s.Engine.Models, ", "))
	if s.Engine.Evidence != "" {
		fmt.Fprintf(w, "         %s because %s; serves %s; %d requests from elsewhere; restarted %d times\n", s.Engine.Kind, s.Engine.Evidence, served(s.Engine.Serves), s.Engine.Outside, s.Engine.Restarts)
	}
	printGPU(w, &s.GPU)
	fmt.Fprintf(w, "entered  %d requests, %d forwarded, %d repeated, %d without a replica\n", s.Picks.Total, s.Picks.Forwarded, s.Picks.Retries, s.Picks.Failed)
	if s.Mode == agent.ModeShadow {
		fmt.Fprintln(w, paint("shadow   "+shadowLine(s), "warming", colour))
	}
	fmt.Fprintf(w, "gossip   %d members, records %s ms old (median)\n\n", s.Gossip.Members, opt(s.Gossip.ReportAgeP50MS, "%.0f"))
	t := table{right: []bool{false, false, true, true, true, true, true, true, true}}
	t.add("REPLICA", "STATE", "RUNNING", "WAITING", "HELD", "KV", "FIRST TOKEN", "FROM HERE", "AGE")
	for _, r := range s.Peers {
		name, age := r.Node, opt(r.AgeMS, "%d ms")
		if r.Self {
			name, age = name+" *", "-"
		}
		kv := r.KVUsage
		kv.V *= 100
		t.add(name, r.State, opt(r.Running, "%d"), opt(r.Waiting, "%d"), opt(r.Held, "%d"), opt(kv, "%.0f%%"), opt(r.PredictedTTFTMS, "%.0f ms"), fmt.Sprint(r.InflightFromHere), age)
	}
	t.write(w, func(col int, cell string) string {
		if col == 1 {
			return paint(cell, strings.TrimSpace(cell), colour)
		}
		return cell
	})
	printReadings(w, s.Engine.Readings)
	if len(s.Engine.Learned) > 0 {
		fmt.Fprintln(w)
		l := table{right: []bool{false, true, true, true, true}}
		l.add("LEARNED OF", "ANSWERS", "BYTES PER TOKEN", "OUTPUT P50", "P90")
		for _, m := range s.Engine.Learned {
			l.add(m.Model, fmt.Sprint(m.Answers), opt(m.BytesPerToken, "%.2f"), opt(m.OutputP50, "%d"), opt(m.OutputP90, "%d"))
		}
		l.write(w, nil)
	}
}

func served(kinds []string) string {
	if len(kinds) == 0 {
		return "all kinds of path, as far as is known"
	}
	return strings.Join(kinds, ", ")
}

// printGPU writes the memory of all cards together and then each card.
func printGPU(w io.Writer, g *agent.GPUStatus) {
	switch {
	case g.Why != "":
		fmt.Fprintf(w, "gpu      unknown: %s\n", g.Why)
	default:
		fmt.Fprintf(w, "gpu      %.1f of %.1f GiB (%s)\n", float64(g.MemoryUsed.V)/(1<<30), float64(g.MemoryTotal.V)/(1<<30), g.Method)
	}
	for _, c := range g.Cards {
		u := c.Utilization
		u.V *= 100
		fmt.Fprintf(w, "         %d %s %s: works %s, %s processes (%s of others), %s ECC errors", c.Index, c.Name, c.UUID, opt(u, "%.0f%%"),
			opt(c.Processes, "%d"), opt(c.Others, "%d"), opt(c.ECCErrors, "%d"))
		for _, x := range append(c.Throttle, c.Trouble...) {
			fmt.Fprintf(w, ", %s", x)
		}
		fmt.Fprintln(w)
	}
}

// printReadings writes each number of the engine with its source, or why it is unknown.
func printReadings(w io.Writer, readings []agent.ReadingStatus) {
	if len(readings) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := table{right: []bool{false, true, true, false}}
	t.add("READING", "VALUE", "AGE", "FROM")
	for _, r := range readings {
		from := strings.TrimSpace(r.Page + "  " + r.Metric)
		value := opt(r.Value, "%.6g")
		if !r.Value.OK {
			value, from = "unknown", r.Why
			if r.Metric != "" {
				from = r.Metric + ": " + r.Why
			}
		}
		t.add(r.Name, value, opt(r.AgeMS, "%d ms"), from)
	}
	t.write(w, nil)
}

// opt prints a value, or - if it is unknown.
func opt[T any](x routing.Opt[T], format string) string {
	if !x.OK {
		return "-"
	}
	return fmt.Sprintf(format, x.V)
}

// paint colours text by a replica's state, on a terminal only.
func paint(text, state string, colour bool) string {
	if !colour {
		return text
	}
	code := "33" // yellow: on its way
	switch state {
	case "ready":
		code = "32"
	case "suspect", "ejected", "gone":
		code = "31"
	case "STATE":
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
