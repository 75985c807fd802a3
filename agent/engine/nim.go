package engine

import (
	"slices"

	"github.com/grapevine-lb/grapevine/routing"
)

// NVIDIA NIM for LLMs (metric table of its documentation): vLLM's names without the prefix, at /v1/metrics. Newer
// images run vLLM inside and print its names, so both are tried.
var nimTable = Table{
	Kind:     NIM,
	Prefixes: []string{"num_requests_running", "num_request_max", "num_requests_waiting"},
	Pages:    []Page{{Name: mainPage, Paths: []string{"/v1/metrics", "/metrics"}}},
	Entries: slices.Concat([]Entry{
		one(FieldRunning, Sum, "num_requests_running"),
		one(FieldWaiting, Sum, "num_requests_waiting"),
		one(FieldRunLimit, Sum, "num_request_max"),
		one(FieldKVUsed, Mean, "gpu_cache_usage_perc"),
		one(FieldPromptTokens, Sum, "prompt_tokens_total"),
		one(FieldGenerationTokens, Sum, "generation_tokens_total"),
		one(FieldFirstTokens, Sum, "time_to_first_token_seconds_count"),
	}, vllmEntries),
	Adapters: "vllm:lora_requests_info",
	Health: []Probe{
		{Path: "/v1/health/ready", Rules: []Rule{{Reply: Reply{Status: 503}, State: Down, Before: until(Loading)}}},
		{Path: "/health"},
	},
	WarmUp:  []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
	Version: "/v1/version",
	Abilities: Abilities{
		ContinueCompletions: true,
		StreamUsage:         true,
		NotRun:              vllmTable.Abilities.NotRun,
		Dead:                vllmTable.Abilities.Dead,
	},
}
