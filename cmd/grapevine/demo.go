package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/grapevine-lb/grapevine/agent/demo"
)

// runDemo shows a simulated fleet with real agents. It fails if a request failed.
func runDemo(ctx context.Context, p *process, args []string) error {
	f := p.flags("demo")
	duration := f.Duration("duration", time.Minute, "of both halves together")
	replicas := f.Int("replicas", 4, "simulated engines, each with an agent")
	slow := f.Float64("slow", 0.5, "speed of one replica relative to the others; 1 makes all equal")
	seed := f.Uint64("seed", 1, "of arrivals and lengths")
	policy := f.String("policy", "auto", "how the agents choose, as GRAPEVINE_POLICY")
	asJSON := f.Bool("json", false, "print one JSON object and nothing else")
	verbose := f.Bool("verbose", false, "show the agents' logs")
	if err := p.parse(f, args); err != nil {
		return err
	}
	if *replicas < 1 || *replicas > 64 || !(*slow > 0 && *slow <= 100) || *duration < time.Second {
		return fmt.Errorf("grapevine demo: --replicas must be 1 to 64, --slow above 0 and at most 100, --duration at least 1s: %w", errUsage)
	}
	cfg := demo.Config{Replicas: *replicas, Slow: *slow, Duration: *duration, Seed: *seed, Policy: *policy}
	if !*asJSON {
		cfg.Out, cfg.Terminal = p.out, p.terminal && !*verbose
	}
	if *verbose {
		cfg.Logger = slog.New(slog.NewTextHandler(p.err, nil))
	}
	ctx, stop := untilSignal(ctx, p)
	defer stop()
	res, err := demo.Run(ctx, cfg)
	if err != nil {
		return err
	}
	if *asJSON {
		if err := json.NewEncoder(p.out).Encode(res); err != nil {
			return err
		}
	}
	if res.Errors > 0 {
		return fmt.Errorf("%d of %d requests failed", res.Errors, res.Requests)
	}
	return nil
}
