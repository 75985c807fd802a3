package enginesim_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// Two prompts on one engine, in virtual time: the second finds its beginning in the prefix cache.
func ExampleEngine() {
	e := enginesim.New(enginesim.Rates(10_000, 20*time.Millisecond, 8))
	prefix := []uint64{11, 12, 13} // hashes of three blocks of 512 tokens
	for id := range uint64(2) {
		_, err := e.Submit(time.Duration(id)*time.Second, enginesim.Job{ID: id, Prompt: 1536, Output: 6, Blocks: prefix})
		if err != nil {
			fmt.Println(err)
		}
		for at, ok := e.NextEvent(); ok; at, ok = e.NextEvent() {
			for _, ev := range e.Advance(at) {
				fmt.Println(ev.At, "job", ev.Job, ev.Kind, "cached", ev.Cached, "tokens", ev.Tokens)
			}
		}
	}
	// Output:
	// 0s job 0 started cached 0 tokens 0
	// 153.6ms job 0 first cached 0 tokens 1
	// 253.6ms job 0 done cached 0 tokens 6
	// 1s job 1 started cached 1535 tokens 0
	// 1.02s job 1 first cached 0 tokens 1
	// 1.12s job 1 done cached 0 tokens 6
}

// An engine in the process: it serves like vLLM until the context ends.
func ExampleServer() {
	s, err := enginesim.NewServer(enginesim.ServerConfig{Model: "tiny", Params: enginesim.Rates(10_000, time.Millisecond, 8)})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _ = s.Run(ctx) }()
	hs := httptest.NewServer(s)
	defer hs.Close()
	resp, err := http.Post(hs.URL+"/v1/chat/completions", "application/json",
		strings.NewReader(`{"model":"tiny","messages":[{"role":"user","content":"Say hello"}],"max_tokens":3,"stream":true}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(strings.Count(string(body), "data: "), "events,", err)
	// Output: 5 events, <nil>
}
