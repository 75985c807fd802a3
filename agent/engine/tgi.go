package engine

import "github.com/grapevine-lb/grapevine/routing"

// Text Generation Inference 3 (names from router/src/server.rs and backends/v3, v3.3.7). Queue and batch size are
// absent until the first request. The KV share is what the batch has reserved, not what it has filled.
var tgiTable = Table{
	Kind:     TGI,
	Prefixes: []string{"tgi_"},
	Pages:    []Page{{Name: mainPage, Paths: []string{"/metrics"}}},
	Entries: []Entry{
		one(FieldRunning, Sum, "tgi_batch_current_size"),
		one(FieldWaiting, Sum, "tgi_queue_size"),
		one(FieldKVUsed, Sum, "tgi_batch_current_max_tokens").
			then(Over, Term{Names: []string{"tgi_batch_max_total_tokens"}, Fold: Sum}),
		one(FieldKVCapacity, Sum, "tgi_batch_max_total_tokens"),
		one(FieldPromptTokens, Sum, "tgi_request_input_length_sum"),
		one(FieldGenerationTokens, Sum, "tgi_request_generated_tokens_sum"),
		one(FieldFirstTokens, Sum, "tgi_request_queue_duration_count"), // once for each request that leaves the queue
	},
	Health: []Probe{{Path: "/health"}},
	Models: ModelList{Info: "/info"},
	WarmUp: []Service{routing.ServeChat, routing.ServeCompletions},
	Abilities: Abilities{
		CountsLate: true,
		// A trailing assistant message is continued, but white space at its end is trimmed: not exact.
		ContinueCompletions: true,
		StreamUsage:         true,
		HeadWhenQueued:      true,
		Serves:              serveText,
		NotRun:              []Reply{{429, "Model is overloaded"}},
	},
}
