package engine_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"

	"github.com/grapevine-lb/grapevine/agent/engine"
)

// A reader finds out by itself what it talks to.
func ExampleReader() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		_, _ = fmt.Fprint(w, "vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"1\"} 2\nvllm:kv_cache_usage_perc NaN\n")
	}))
	defer server.Close()
	u, err := url.Parse(server.URL)
	if err != nil {
		panic(err)
	}

	r := engine.New(engine.Config{URL: u})
	reading, err := r.Read(context.Background())
	fmt.Println(err, r.Kind(), "because", r.Evidence())
	fmt.Println("running", reading.Running.V, reading.Running.OK)
	for _, f := range []engine.Field{engine.FieldKVUsed, engine.FieldWaiting} {
		s := reading.Field(f)
		fmt.Println(s.Field, "unknown:", s.Metric, "on", s.Page, "is", s.Why)
	}
	// Output:
	// <nil> vllm because /metrics has vllm: metrics
	// running 5 true
	// kv_usage unknown: vllm:kv_cache_usage_perc on /metrics is not a finite number
	// waiting unknown: vllm:num_requests_waiting on /metrics is not on the page
}

// A mapping for an engine without a table: a JSON page with one element per worker.
func ExampleParseMapping() {
	m, err := engine.ParseMapping(`
		running = sum(max by (rank) (/workers/*/active)) @ json:/stats
		kv_usage = cache_bytes_used / cache_bytes`)
	fmt.Println(len(m.Entries), err)
	_, err = engine.ParseMapping("speed = active")
	fmt.Println(err != nil)
	// Output:
	// 2 <nil>
	// true
}
