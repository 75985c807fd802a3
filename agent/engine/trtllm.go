package engine

import "github.com/grapevine-lb/grapevine/routing"

// trtllm-serve (names from tensorrt_llm/metrics/collector.py). There is no sample until a request has finished, and
// while long streams run the gauges show the last finished moment; both need return_perf_metrics and
// enable_iter_perf_stats. Its /metrics is another thing, a list that reading empties: never read.
var trtllmTable = Table{
	Kind:     TRTLLM,
	Prefixes: []string{"trtllm_"},
	OwnedBy:  "tensorrt_llm",
	Pages: []Page{{Name: mainPage, Paths: []string{"/prometheus/metrics"},
		Hint: "set return_perf_metrics and enable_iter_perf_stats"}},
	Entries: []Entry{
		one(FieldRunning, Sum, "trtllm_num_requests_running"),
		one(FieldWaiting, Sum, "trtllm_num_requests_waiting"),
		one(FieldRunLimit, Sum, "trtllm_max_num_active_requests"),
		one(FieldKVUsed, Mean, "trtllm_kv_cache_utilization"),
		one(FieldKVCapacity, Sum, "trtllm_kv_cache_max_blocks").
			then(Times, Term{Names: []string{"trtllm_kv_cache_tokens_per_block"}, Fold: Max}),
		one(FieldPrefixHitRate, Mean, "trtllm_kv_cache_hit_rate"),
		one(FieldPromptTokens, Sum, "trtllm_prompt_tokens_total"),
		one(FieldGenerationTokens, Sum, "trtllm_generation_tokens_total"),
		one(FieldFirstTokens, Sum, "trtllm_time_to_first_token_seconds_count"),
	},
	Health:  []Probe{{Path: "/health"}}, // /health_generate runs a request
	WarmUp:  []Service{routing.ServeChat, routing.ServeCompletions},
	Version: "/version",
	Abilities: Abilities{
		CountsLate:          true,
		ContinueCompletions: true, // chat has add_generation_prompt only
		StreamUsage:         true,
		Serves:              serveText | routing.ServeResponses,
	},
}

// Triton with the TensorRT-LLM backend (names from tensorrtllm_backend's README). Its metrics have a listener of
// their own, port 8002 by default, and refresh every 2 s. Older releases have no waiting row.
var tritonTable = Table{
	Kind:     Triton,
	Prefixes: []string{"nv_trt_llm_", "nv_inference_"},
	Pages: []Page{{Name: mainPage, Paths: []string{"/metrics", ":8002/metrics"}, // the OpenAI frontend's, the server's
		Hint: "set GRAPEVINE_ENGINE_METRICS_URL to Triton's metrics listener"}},
	Entries: []Entry{
		tritonRequests(FieldRunning, "active").
			then(Minus, Term{Names: []string{tritonRequestMetric}, Where: tritonType("waiting"), Fold: Sum}),
		tritonRequests(FieldWaiting, "waiting"),
		tritonRequests(FieldWaiting, "active").
			then(Minus, Term{Names: []string{tritonRequestMetric}, Where: tritonType("scheduled"), Fold: Sum}),
		tritonRequests(FieldRunLimit, "max"),
		tritonBlocks(FieldKVUsed, Mean, "fraction"),
		tritonBlocks(FieldKVUsed, Sum, "used").then(Over, Term{Names: []string{tritonBlockMetric}, Where: tritonBlock("max"), Fold: Sum}),
		tritonBlocks(FieldKVCapacity, Sum, "max").
			then(Times, Term{Names: []string{tritonBlockMetric}, Where: tritonBlock("tokens_per"), Fold: Max}),
	},
	Health: []Probe{{Path: "/v2/health/ready", Rules: []Rule{
		{Reply: Reply{Status: 400}, State: Down, Before: until(Loading)},
		{Reply: Reply{Status: 503}, State: Down, Before: until(Loading)},
	}}},
	WarmUp: []Service{routing.ServeChat, routing.ServeCompletions}, // of its OpenAI frontend
	Abilities: Abilities{
		CountsLate:          true,
		ContinueCompletions: true,
		Serves:              serveText,
	},
}

const (
	tritonRequestMetric = "nv_trt_llm_request_metrics"
	tritonBlockMetric   = "nv_trt_llm_kv_cache_block_metrics"
)

func tritonType(t string) []Match  { return []Match{{Label: "request_type", Value: t}} }
func tritonBlock(t string) []Match { return []Match{{Label: "kv_cache_block_type", Value: t}} }

func tritonRequests(f Field, t string) Entry {
	return one(f, Sum, tritonRequestMetric).where(tritonType(t)...)
}

func tritonBlocks(f Field, fold Fold, t string) Entry {
	return one(f, fold, tritonBlockMetric).where(tritonBlock(t)...)
}
