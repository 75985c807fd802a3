package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// runDrain makes an agent drain. With --no-wait it returns as soon as the agent has begun, for a preStop hook.
func runDrain(ctx context.Context, p *process, args []string) error {
	f := p.flags("drain")
	url := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	noWait := f.Bool("no-wait", false, "return when the drain has begun, not when it is over")
	if err := p.parse(f, args); err != nil {
		return err
	}
	c, err := newConsoleClient(*url, p.environ)
	if err != nil {
		return err
	}
	b, err := c.do(ctx, http.MethodPost, "/drain", 5*time.Second)
	if err != nil {
		return err
	}
	fmt.Fprintln(p.out, strings.TrimSpace(string(b)))
	if *noWait {
		return nil
	}
	if b, err = c.do(ctx, http.MethodGet, "/drained", 0); err != nil {
		return err
	}
	fmt.Fprintln(p.out, strings.TrimSpace(string(b)))
	return nil
}
