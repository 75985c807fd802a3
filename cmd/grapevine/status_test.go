package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/routing"
)

// Every reading has a line: its value, age and source, or that it is unknown and why.
func TestStatusShowsReadings(t *testing.T) {
	s := agent.Status{State: "ready"}
	s.Engine.Kind, s.Engine.Evidence, s.Engine.Serves = "vllm", "/metrics has vllm: metrics", []string{"chat", "completions"}
	s.Engine.Readings = []agent.ReadingStatus{
		{Name: "running", Value: routing.Some(3.0), Page: "/metrics", Metric: "vllm:num_requests_running", AgeMS: routing.Some(int64(140))},
		{Name: "kv_usage", Page: "/metrics", Metric: "vllm:kv_cache_usage_perc", AgeMS: routing.Some(int64(140)), Why: "not a finite number"},
		{Name: "waiting_tokens", Why: "this engine has no such number"},
	}
	s.Engine.Learned = []agent.ModelLearned{{Model: "m", Answers: 7, BytesPerToken: routing.Some(1.6), OutputP50: routing.Some(128)}}
	s.GPU = agent.GPUStatus{Method: "GRAPEVINE_GPU_DEVICES", MemoryUsed: routing.Some(uint64(72 << 30)), MemoryTotal: routing.Some(uint64(80 << 30)),
		Cards: []agent.CardStatus{{Index: 1, Name: "H100", UUID: "GPU-1", Utilization: routing.Some(0.97), Processes: routing.Some(2), Throttle: []string{"hw_thermal"}, Trouble: []string{"XID 79 (card fell off the bus)"}}}}
	var b strings.Builder
	printStatus(&b, &s, false)
	out := b.String()
	for _, want := range []string{
		"vllm because /metrics has vllm: metrics; serves chat, completions",
		"running               3  140 ms  /metrics  vllm:num_requests_running\n",
		"kv_usage        unknown  140 ms  vllm:kv_cache_usage_perc: not a finite number\n",
		"waiting_tokens  unknown       -  this engine has no such number\n",
		"m                 7             1.60         128    -\n",
		"gpu      72.0 of 80.0 GiB (GRAPEVINE_GPU_DEVICES)\n",
		"1 H100 GPU-1: works 97%, 2 processes (- of others), - ECC errors, hw_thermal, XID 79 (card fell off the bus)\n",
	} {
		assert.Contains(t, out, want)
	}
}
