package main

import (
	"context"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// endings are what engines do on SIGTERM, as observed: each returns when the process may exit.
var endings = map[string]func(context.Context, *enginesim.Server){
	// vLLM by default: nobody is let in, each stream ends with finish_reason "abort" and [DONE], exit a second later.
	"abort": func(ctx context.Context, s *enginesim.Server) {
		inject(s, "refuse")
		inject(s, "abort")
		sleep(ctx, 1500*time.Millisecond)
	},
	// SGLang, vLLM V0: health turns bad, nobody is let in, streams go on to their end.
	"finish": func(ctx context.Context, s *enginesim.Server) {
		inject(s, "unhealthy")
		inject(s, "refuse")
		for s.Stats().Calls > 0 && ctx.Err() == nil {
			sleep(ctx, 20*time.Millisecond)
		}
	},
	// llama.cpp: tokens stop, streams get comment lines only; new requests are accepted but not answered for 2 s, then
	// refused; what is open is cut after 26 s.
	"silent": func(ctx context.Context, s *enginesim.Server) {
		inject(s, "silence")
		sleep(ctx, 2*time.Second)
		inject(s, "refuse")
		sleep(ctx, 24*time.Second)
	},
	// vLLM with --shutdown-timeout 15: /health stays 200, new requests get 500, streams go on for 15 s, then stay open
	// without a word until the client gives up.
	"drain": func(ctx context.Context, s *enginesim.Server) {
		inject(s, "shutdown")
		for end := time.Now().Add(15 * time.Second); s.Stats().Calls > 0 && time.Now().Before(end) && ctx.Err() == nil; {
			sleep(ctx, 20*time.Millisecond)
		}
		inject(s, "hang")
		inject(s, "refuse")
		for s.Stats().Calls > 0 && ctx.Err() == nil {
			sleep(ctx, 20*time.Millisecond)
		}
	},
}

func inject(s *enginesim.Server, kind string) {
	if err := s.Inject(enginesim.Fault{Kind: kind}); err != nil {
		panic(err) // the kinds above are known
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
