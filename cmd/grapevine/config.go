package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"runtime"
	"text/tabwriter"

	"github.com/grapevine-lb/grapevine/agent"
)

// runConfig prints the effective settings, secrets masked, or the documentation tables.
func runConfig(_ context.Context, p *process, args []string) error {
	f := p.flags("config")
	asJSON := f.Bool("json", false, "print a JSON array")
	docs := f.Bool("docs", false, "print all variables as a Markdown table")
	metrics := f.Bool("metrics", false, "print all metrics as a Markdown table")
	if err := p.parse(f, args); err != nil {
		return err
	}
	switch {
	case *docs:
		fmt.Fprint(p.out, agent.ConfigDocs())
		return nil
	case *metrics:
		fmt.Fprint(p.out, agent.MetricsDocs())
		return nil
	}
	cfg, err := agent.ConfigFromEnv(p.environ)
	if err != nil {
		return fmt.Errorf("%w: %w", err, errUsage)
	}
	for _, w := range cfg.Warnings {
		fmt.Fprintln(p.err, "warning: "+w)
	}
	if *asJSON {
		enc := json.NewEncoder(p.out)
		enc.SetIndent("", "  ")
		return enc.Encode(cfg.Effective())
	}
	w := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	for _, s := range cfg.Effective() {
		fmt.Fprintf(w, "%s\t%s\t%s\n", s.Variable, s.Value, s.Source)
	}
	return w.Flush()
}

// runKeygen prints a new gossip key: 32 random bytes in base64.
func runKeygen(_ context.Context, p *process, args []string) error {
	if err := p.parse(p.flags("keygen"), args); err != nil {
		return err
	}
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return err
	}
	_, err := fmt.Fprintln(p.out, base64.StdEncoding.EncodeToString(key))
	return err
}

func runVersion(_ context.Context, p *process, args []string) error {
	if err := p.parse(p.flags("version"), args); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p.out, "grapevine %s (%s, %s/%s)\n", agent.Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}
