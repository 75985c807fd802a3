package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/grapevine-lb/grapevine/agent"
)

// runCheck tries out what an agent with this environment would need, before it is started or beside one that runs. It
// fails (exit 1) if something would not work.
func runCheck(ctx context.Context, p *process, args []string) error {
	f := p.flags("check")
	asJSON := f.Bool("json", false, "print a JSON array")
	if err := p.parse(f, args); err != nil {
		return err
	}
	cfg, err := agent.ConfigFromEnv(p.environ)
	var found []agent.Check
	if err != nil {
		found = []agent.Check{{Name: "config", Level: agent.CheckFail, Text: err.Error(), Remedy: "`grapevine config --docs` lists what is allowed"}}
	} else {
		found = agent.Preflight(ctx, cfg)
	}
	failed := 0
	for _, c := range found {
		if c.Level == agent.CheckFail {
			failed++
		}
	}
	if *asJSON {
		enc := json.NewEncoder(p.out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(found); err != nil {
			return err
		}
	} else {
		for _, c := range found {
			fmt.Fprintln(p.out, checkLine(c, p.terminal))
		}
	}
	if failed > 0 {
		return errors.New(plural(failed, "check") + " failed")
	}
	return nil
}

// checkLine is one finding on one line: how it is, what was looked at, what was seen, what to do.
func checkLine(c agent.Check, colour bool) string {
	state := map[agent.CheckLevel]string{agent.CheckOK: "ready", agent.CheckNote: "warming", agent.CheckFail: "suspect"}[c.Level]
	line := paint(fmt.Sprintf("%-4s", c.Level), state, colour) + fmt.Sprintf("  %-8s %s", c.Name, c.Text)
	if c.Remedy != "" {
		line += " → " + c.Remedy
	}
	return line
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
