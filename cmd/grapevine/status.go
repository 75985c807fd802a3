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
	if err := p.parse(f, args); err != nil {
		return err
	}
	c, err := newConsoleClient(*url, p.environ)
	if err != nil {
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
	if s.GPU.Why != "" {
		fmt.Fprintf(w, "gpu      unknown: %s\n", s.GPU.Why)
	} else {
		fmt.Fprintf(w, "gpu      %.1f of %.1f GiB (%s)\n", float64(s.GPU.MemoryUsed.V)/(1<<30), float64(s.GPU.MemoryTotal.V)/(1<<30), s.GPU.Method)
	}
	fmt.Fprintf(w, "entered  %d requests, %d forwarded, %d repeated, %d without a replica\n", s.Picks.Total, s.Picks.Forwarded, s.Picks.Retries, s.Picks.Failed)
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
