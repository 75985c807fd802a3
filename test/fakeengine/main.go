// Command fakeengine is an inference engine without a model, as a process: it speaks like vLLM, SGLang or llama.cpp, takes
// the time that a real one would take, and fails on command. See package enginesim for what is simulated.
//
//	fakeengine -listen 127.0.0.1:0 -dialect vllm -slots 8 -speed 0.5
//
// When it serves it prints one line on standard output, "listening on 127.0.0.1:43210". Each flag can be given as
// FAKEENGINE_NAME in the environment, the dash as an underscore; flags win. Faults are made with POST /fault; GET /journal
// lists what ran and GET /state tells the exact load, on the same address or on -control.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

func main() {
	opt, err := parse(os.Args[1:], os.Environ(), os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "fakeengine:", err)
		os.Exit(2)
	}
	if err := run(opt, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "fakeengine:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	listen, control, journal, term string
	server                         enginesim.ServerConfig
}

// parse reads flags and, for those not given, the environment.
func parse(args, environ []string, usage io.Writer) (options, error) {
	var o options
	fs := flag.NewFlagSet("fakeengine", flag.ContinueOnError)
	fs.SetOutput(usage)
	fs.StringVar(&o.listen, "listen", "127.0.0.1:0", "`address` to serve on: host:port or unix:/path")
	fs.StringVar(&o.control, "control", "", "second `address` for /fault and /journal, which answers even while the engine hangs or refuses")
	fs.StringVar(&o.journal, "journal", "", "`file` that gets a JSON line at the start and end of each run; it survives a kill")
	fs.StringVar(&o.term, "on-term", "", "what SIGTERM does: abort, finish, silent, drain (default: as the dialect's engine does)")
	c := &o.server
	fs.StringVar(&c.Dialect, "dialect", "vllm", "vllm, sglang or llamacpp")
	fs.StringVar(&c.Model, "model", "sim", "model name")
	aliases := fs.String("aliases", "", "comma list of more names of the model")
	fs.Uint64Var(&c.Seed, "seed", 1, "of the model: equal seeds say the same")
	profile := fs.String("profile", "", "small, h100-8b, h100x4-70b or a10-8b, instead of the rates below")
	speed := fs.Float64("speed", 1, "factor on everything: 0.5 is half as fast")
	prefill := fs.Float64("prefill-rate", 10_000, "prompt `tokens` computed in a second")
	step := fs.Duration("decode-step", 20*time.Millisecond, "time for one token of each running sequence")
	slots := fs.Int("slots", 0, "sequences running at most (default 32, or the profile's)")
	kv := fs.Int("kv", 0, "`tokens` in the KV cache (default 4096 for each slot, or the profile's)")
	budget := fs.Int("budget", 0, "`tokens` computed in a step at most (default four decode steps' worth, or the profile's)")
	block := fs.Int("block", 0, "`tokens` in a block of the prefix cache (default 512)")
	length := fs.Int("context", 0, "longest prompt plus answer in `tokens` (default: what the KV cache holds)")
	queued := fs.Int("max-queued", 0, "refuse with 503 when so many requests run or wait; 0 never refuses")
	fs.IntVar(&c.MeanOutput, "mean-output", 128, "`tokens` of an answer without limit, on average")
	fs.BoolVar(&c.StopEarly, "stop-early", false, "an answer may end before max_tokens")
	fs.BoolVar(&c.HideCached, "hide-cached", false, "leave cached_tokens out of the usage")
	fs.DurationVar(&c.HangUpLag, "hang-up-lag", 0, "time from a client's hang-up to the end of its job")
	fs.BoolVar(&c.Embeddings, "embeddings", false, "serve /v1/embeddings")
	fs.DurationVar(&c.LoadFor, "load-for", 0, "time that the model takes to load")
	fs.DurationVar(&c.KeepAlive, "keep-alive", 5*time.Second, "idle connections are closed after")
	fs.StringVar(&c.APIKey, "api-key", "", "demanded on /v1 paths")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		name, ours := strings.CutPrefix(name, "FAKEENGINE_")
		if !ours {
			continue
		}
		name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
		if fs.Lookup(name) == nil {
			return o, fmt.Errorf("FAKEENGINE_%s: no such flag", strings.ToUpper(name))
		}
		if !given[name] {
			if err := fs.Set(name, value); err != nil {
				return o, fmt.Errorf("FAKEENGINE_%s=%q: %w", strings.ToUpper(name), value, err)
			}
		}
	}
	if *aliases != "" {
		c.Aliases = strings.Split(*aliases, ",")
	}
	p := enginesim.Params{}
	if *profile != "" {
		var err error
		if p, err = enginesim.Profile(*profile); err != nil {
			return o, err
		}
	} else {
		if *prefill <= 0 || *step <= 0 {
			return o, errors.New("prefill-rate and decode-step must be positive")
		}
		n := *slots
		if n <= 0 {
			n = 32
		}
		p = enginesim.Rates(*prefill, *step, n)
	}
	for _, f := range []struct {
		to   *int
		from int
	}{{&p.Slots, *slots}, {&p.KVTokens, *kv}, {&p.Budget, *budget}, {&p.BlockTokens, *block}, {&p.Context, *length}, {&p.MaxQueued, *queued}} {
		if f.from != 0 {
			*f.to = f.from
		}
	}
	p.Speed = *speed
	c.Params = p
	if o.term == "" {
		o.term = map[string]string{"sglang": "finish", "llamacpp": "silent"}[c.Dialect]
		if o.term == "" {
			o.term = "abort"
		}
	}
	if _, ok := endings[o.term]; !ok {
		return o, fmt.Errorf("on-term: %q is none of abort, finish, silent, drain", o.term)
	}
	return o, p.Validate()
}

// run serves until SIGTERM or SIGINT and what that entails; a second signal ends it at once.
func run(o options, out io.Writer) error {
	if o.journal != "" {
		f, err := os.OpenFile(o.journal, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		defer f.Close()
		o.server.Journal = f
	}
	o.server.OnDie = func() { os.Exit(137) } // as kill -9 leaves it: the kernel closes what was open
	s, err := enginesim.NewServer(o.server)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = s.Run(ctx) })
	if o.control != "" {
		l, err := listen(ctx, o.control)
		if err != nil {
			return fmt.Errorf("control: %w", err)
		}
		hs := &http.Server{Handler: s.Control(), ReadHeaderTimeout: 10 * time.Second}
		wg.Go(func() { _ = hs.Serve(l) })
		defer hs.Close()
		fmt.Fprintln(out, "control on", l.Addr())
	}
	failed := make(chan error, 1)
	wg.Go(func() {
		network, address := split(o.listen)
		failed <- s.ListenAndServe(ctx, network, address, func(a net.Addr) { fmt.Fprintln(out, "listening on", a) })
	})
	select {
	case err := <-failed:
		return err
	case <-signals:
	}
	ended := make(chan struct{})
	wg.Go(func() {
		endings[o.term](ctx, s)
		close(ended)
	})
	select {
	case <-ended:
	case <-signals:
	}
	return nil
}

func split(address string) (network, rest string) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return "unix", path
	}
	return "tcp", address
}

func listen(ctx context.Context, address string) (net.Listener, error) {
	network, rest := split(address)
	if network == "unix" {
		_ = os.Remove(rest)
	}
	return new(net.ListenConfig).Listen(ctx, network, rest)
}
