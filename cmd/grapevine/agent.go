package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/grapevine-lb/grapevine/agent"
)

// runAgent runs the agent until SIGTERM or SIGINT, then drains it; a second signal ends the process at once.
func runAgent(ctx context.Context, p *process, args []string) error {
	if err := p.parse(p.flags("agent"), args); err != nil {
		return err
	}
	cfg, err := agent.ConfigFromEnv(p.environ)
	if err != nil {
		return fmt.Errorf("%w: %w", err, errUsage)
	}
	thread := confine(p.environ)
	a, err := agent.New(cfg, agent.Options{Logger: agent.NewLogger(p.err, cfg), StreamThread: thread})
	if err != nil {
		return fmt.Errorf("%w: %w", err, errUsage)
	}
	ctx, stop := untilSignal(ctx, p)
	defer stop()
	return a.Run(ctx)
}

// untilSignal returns a context that the first SIGTERM or SIGINT ends. The second one ends the process with exit code 1.
func untilSignal(ctx context.Context, p *process) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	done := make(chan struct{})
	go func() { // owned by the caller: stop ends it
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case s := <-signals:
				if n > 0 {
					fmt.Fprintf(p.err, "grapevine: %s again, ending at once\n", s)
					os.Exit(exitFailure)
				}
				cancel()
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		cancel()
	}
}
