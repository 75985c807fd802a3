package engine

import "github.com/grapevine-lb/grapevine/routing"

// vLLM, V1 (names read in the wheels 0.8.5 to 0.32.0, pages captured from 0.32.0) and V0 (0.8.5), and the llm-d
// inference simulator, which prints vLLM's names.
//
//   - One series per data-parallel engine: counts are summed, the KV share is the mean, so that share × capacity is
//     what is in use.
//   - 0.9.2 to 0.10.2 print the old and the new names side by side; the first that exists is taken.
//   - With two API processes the gauges are absent until the first request: unknown, not unhealthy.
//   - num_requests_waiting_by_reason is the same requests again.
//   - /load is no source: it is always 0 without --enable-server-load-tracking, and with several API processes each
//     connection sees another part.
var vllmTable = Table{
	Kind:     VLLM,
	Prefixes: []string{"vllm:"},
	OwnedBy:  "vllm",
	Pages:    []Page{{Name: mainPage, Paths: []string{"/metrics"}}},
	Entries:  vllmEntries,
	Adapters: "vllm:lora_requests_info",
	Health:   []Probe{{Path: "/health"}}, // refused while loading, 503 when the engine behind it has died
	WarmUp:   []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
	Version:  "/version",
	Abilities: Abilities{
		ContinueChat:        true,
		ContinueFields:      `"continue_final_message":true,"add_generation_prompt":false`,
		ContinueCompletions: true,
		Priority:            LowFirst,
		StreamUsage:         true,
		ContinuousUsage:     true,
		HeadWhenQueued:      true,
		OneTask:             true,
		Tokenize:            Tokenize{Path: "/tokenize", Field: "prompt", Extra: `"add_special_tokens":false`, Count: "/count"},
		NotRun: []Reply{
			{500, "cannot schedule new futures"}, // while draining
		},
		Dead: []Reply{
			{0, "EngineCore encountered an issue"},
			{0, "EngineDeadError"},
			{0, "Background loop has errored already"}, // V0
		},
	},
}

var vllmEntries = []Entry{
	one(FieldRunning, Sum, "vllm:num_requests_running"),
	one(FieldWaiting, Sum, "vllm:num_requests_waiting"),
	one(FieldKVUsed, Mean, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
	// The size in tokens is each engine's own; the number of blocks is the total of all, on every engine.
	one(FieldKVCapacity, Sum, "vllm:cache_config_info").label("kv_cache_size_tokens"),
	one(FieldKVCapacity, Max, "vllm:cache_config_info").label("num_gpu_blocks").
		then(Times, Term{Names: []string{"vllm:cache_config_info"}, Label: "block_size", Fold: Max}),
	// Any engine of the replica that is not awake, level 1 or 2.
	one(FieldAsleep, Max, "vllm:engine_sleep_state").where(Match{"sleep_state", "awake", true}),
	one(FieldPrefixHits, Sum, "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
	one(FieldPrefixQueries, Sum, "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
	one(FieldPrefixHitRate, Mean, "vllm:gpu_prefix_cache_hit_rate"), // V0; -1 when unknown
	one(FieldPromptTokens, Sum, "vllm:prompt_tokens_total"),
	one(FieldGenerationTokens, Sum, "vllm:generation_tokens_total"),
	one(FieldPreemptions, Sum, "vllm:num_preemptions_total"), // late: counted when the request next makes a token
	one(FieldFirstTokens, Sum, "vllm:time_to_first_token_seconds_count"),
	one(FieldProcessStart, Max, "process_start_time_seconds"),
}
