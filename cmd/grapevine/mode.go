package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
)

// runMode prints the mode that the fleet is in, as this agent sees it, or switches it.
func runMode(ctx context.Context, p *process, args []string) error {
	f := p.flags("mode")
	addr := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	to, err := p.parseOne(f, args)
	if err != nil {
		return err
	}
	if to != "" && to != agent.ModeOn && to != agent.ModeShadow {
		return fmt.Errorf("mode: want %s or %s, not %q: %w", agent.ModeShadow, agent.ModeOn, to, errUsage)
	}
	c, err := newConsoleClient(*addr, p.environ)
	if err != nil {
		return err
	}
	if to != "" {
		if _, err := c.do(ctx, http.MethodPost, "/mode?to="+url.QueryEscape(to), 5*time.Second); err != nil {
			return err
		}
	}
	// The others follow within a second; whoever does not is named.
	for wait := time.Now().Add(3 * time.Second); ; {
		b, err := c.do(ctx, http.MethodGet, "/status", 5*time.Second)
		if err != nil {
			return err
		}
		var s agent.Status
		if err := json.Unmarshal(b, &s); err != nil {
			return fmt.Errorf("%s/status: %w", c.base, err)
		}
		other := otherMode(&s)
		if to != "" && len(other) > 0 && time.Now().Before(wait) {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		fmt.Fprintf(p.out, "%s  %d of %s\n", s.Mode, len(s.Peers)-len(other), plural(len(s.Peers), "replica"))
		for _, n := range other {
			fmt.Fprintln(p.out, "not "+s.Mode+": "+n)
		}
		if s.Shadow.Picks > 0 {
			fmt.Fprintln(p.out, shadowLine(&s))
		}
		if to != "" && len(other) > 0 {
			return fmt.Errorf("%s did not follow", plural(len(other), "replica"))
		}
		return nil
	}
}

// otherMode names the replicas whose records show another mode than the agent's own.
func otherMode(s *agent.Status) (names []string) {
	for _, r := range s.Peers {
		shadow := false
		for _, f := range r.Flags {
			shadow = shadow || f == "shadow mode"
		}
		if shadow != (s.Mode == agent.ModeShadow) {
			names = append(names, r.Node)
		}
	}
	return names
}

// shadowLine says what shadow mode has found, in one line.
func shadowLine(s *agent.Status) string {
	line := fmt.Sprintf("%d of %d requests would have moved", s.Shadow.Moved, s.Shadow.Picks)
	if s.Shadow.GainMS.OK {
		line += fmt.Sprintf("; first token %s sooner in the mean (now %s)", milliseconds(s.Shadow.GainMS.V), milliseconds(s.Shadow.TTFTMS.V))
	}
	return line
}
