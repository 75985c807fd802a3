package agent_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
)

// An agent inside another program: configured by the environment, here by a list, and run until a context ends.
func Example() {
	cfg, err := agent.ConfigFromEnv([]string{
		"GRAPEVINE_LISTEN=127.0.0.1:0",
		"GRAPEVINE_PEER_LISTEN=127.0.0.1:0",
		"GRAPEVINE_STATUS_LISTEN=127.0.0.1:0",
		"GRAPEVINE_GOSSIP_LISTEN=127.0.0.1:0",
		"GRAPEVINE_ENGINE_URL=http://127.0.0.1:8000",
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err) // one line for each wrong variable
		os.Exit(2)
	}
	a, err := agent.New(cfg, agent.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond) // signal.NotifyContext in a real program
	defer cancel()
	fmt.Println(a.Run(ctx))
	// Output: <nil>
}

func ExampleConfigFromEnv() {
	_, err := agent.ConfigFromEnv([]string{"GRAPEVINE_POLICY=fastest"})
	fmt.Println(err)
	// Output: GRAPEVINE_POLICY="fastest": must be one of auto, p2c, round_robin, weighted_round_robin, random, least_requests, least_tokens, ewma, consistent_hash, local
}
