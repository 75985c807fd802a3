// Command testagent is the product's agent with what tests need and no operator: a policy that knows all simulated engines'
// exact state, and stops in the middle of a protocol. It is configured like the product, from the environment, and by:
//
//	TESTAGENT_EXACT=PORT   each request goes to the engine with the lowest score by its state in the moment of the pick,
//	                       which is read from GET /state at that port of every member's address
//	TESTAGENT_ORDER=A,B,C  each request goes to the first of these nodes that was not tried yet, prompts
//	                       of more than 10,000 tokens to our own
//	TESTAGENT_STOP=STEP    the process stops itself (SIGSTOP) the first time it comes to that step of the steal protocol
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

func main() {
	if err := run(os.Environ()); err != nil {
		fmt.Fprintln(os.Stderr, "testagent:", err)
		os.Exit(1)
	}
}

func run(environ []string) error {
	cfg, err := agent.ConfigFromEnv(environ)
	if err != nil {
		return err
	}
	opts := agent.Options{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	if port := os.Getenv("TESTAGENT_EXACT"); port != "" {
		opts.Policy = &exact{port: port, client: &http.Client{Timeout: time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	}
	if order := os.Getenv("TESTAGENT_ORDER"); order != "" {
		opts.Policy = inOrder(strings.Split(order, ","))
	}
	if stop := os.Getenv("TESTAGENT_STOP"); stop != "" {
		var once sync.Once
		opts.Step = func(step string) {
			if step == stop {
				once.Do(func() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) })
			}
		}
	}
	a, err := agent.New(cfg, opts)
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	return a.Run(ctx)
}

// inOrder names nodes.
type inOrder []string

func (inOrder) Name() string { return "order" }

func (o inOrder) Pick(s *routing.Snapshot, r *routing.Request, _ time.Time, _ *rand.Rand) routing.Decision {
	rank := func(p *routing.Peer) int {
		node, _, _ := strings.Cut(p.Member().Node, ".") // what follows is new at each start
		return slices.Index(o, node)
	}
	d := routing.Decision{Reason: routing.ReasonNoneUsable, Tokens: r.PromptTokens}
	for _, p := range s.Peers() {
		k := rank(p)
		switch {
		case r.PromptTokens > 10_000 && p.Self():
			return routing.Decision{Peer: p, Reason: routing.ReasonOnly, Tokens: r.PromptTokens}
		case k < 0 || slices.Contains(r.Tried, p.Boot()):
		case d.Peer == nil || k < rank(d.Peer):
			d.Peer, d.Reason = p, routing.ReasonBest
		}
	}
	return d
}

// exact is the exact-state twin: the product's score, written out once more, on the true state of all engines. What it pays
// for the readings comes on top of its times, as it would for anybody who really asked the engines.
type exact struct {
	port   string
	client *http.Client
}

func (*exact) Name() string { return "exact" }

func (e *exact) Pick(s *routing.Snapshot, r *routing.Request, _ time.Time, rnd *rand.Rand) routing.Decision {
	peers := s.Peers()
	scores := make([]float64, len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		wg.Go(func() { scores[i] = e.score(p, r) })
	}
	wg.Wait()
	d := routing.Decision{Reason: routing.ReasonNoneUsable, Score: math.Inf(1), Tokens: r.PromptTokens}
	for _, i := range rnd.Perm(len(peers)) {
		if scores[i] < d.Score {
			d.Peer, d.Score, d.Reason = peers[i], scores[i], routing.ReasonBest
		}
	}
	return d
}

// score is what the request costs at one engine, in seconds; infinite where nobody answers.
func (e *exact) score(p *routing.Peer, r *routing.Request) float64 {
	host, _, err := net.SplitHostPort(p.Member().Addr)
	for _, boot := range r.Tried {
		if err != nil || boot == p.Boot() {
			return math.Inf(1)
		}
	}
	resp, err := e.client.Get("http://" + net.JoinHostPort(host, e.port) + "/state")
	if err != nil {
		return math.Inf(1)
	}
	defer resp.Body.Close()
	var x enginesim.State
	if json.NewDecoder(resp.Body).Decode(&x) != nil || x.Rate <= 0 {
		return math.Inf(1)
	}
	running, waiting, slots := float64(x.Running), float64(x.Waiting), float64(cmp.Or(x.Slots, 1))
	u := float64(r.PromptTokens) / x.Rate
	return float64(x.Pending)/x.Rate + u*(1+0.05*min(running, 32)+0.1*waiting) + 0.5*max(0, (running+waiting+1-0.9*slots)/(0.1*slots))
}
