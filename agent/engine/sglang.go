package engine

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// SGLang 0.5 (names and labels from its own collector class, 0.5.23; /v1/loads from entrypoints/v1_loads.py).
//
// /v1/loads is the best page of all engines: read from shared memory, one element per data-parallel rank, there even
// without --enable-metrics. Behind it /get_load of older versions, then the metrics page, where
//
//   - with --enable-metrics-for-all-schedulers every tensor-, pipeline- and expert-parallel rank repeats the requests
//     of its data-parallel rank, and
//   - with priority scheduling the row priority="" is the total of the others,
//
// so that the largest row of a data-parallel rank is that rank's number. Gauges start as NaN.
var sglangTable = Table{
	Kind:     SGLang,
	Prefixes: []string{"sglang:"},
	OwnedBy:  "sglang",
	Pages: []Page{
		{Name: "loads", Paths: []string{"/v1/loads?include=core"}, JSON: true},
		{Name: mainPage, Paths: []string{"/metrics"}, Every: 5 * time.Second, Hint: "start it with --enable-metrics"},
		{Name: "get_load", Paths: []string{"/get_load"}, JSON: true, Every: 5 * time.Second},
	},
	Entries: []Entry{
		one(FieldRunning, Sum, "/loads/*/num_running_reqs").on("loads"),
		sglangGauge(FieldRunning, Sum, "sglang:num_running_reqs"),
		one(FieldRunning, Sum, "/*/num_reqs").on("get_load").
			then(Minus, Term{Names: []string{"/*/num_waiting_reqs"}, Fold: Sum}),

		one(FieldWaiting, Sum, "/loads/*/num_waiting_reqs").on("loads").
			then(Plus, Term{Names: []string{"/loads/*/queues/grammar"}, Fold: Sum}),
		sglangGauge(FieldWaiting, Sum, "sglang:num_queue_reqs").
			then(Plus, Term{Names: []string{"sglang:num_grammar_queue_reqs"}, Fold: Sum, By: sglangRank, Inner: Max}),
		one(FieldWaiting, Sum, "/*/num_waiting_reqs").on("get_load"),

		one(FieldWaitingTokens, Sum, "/loads/*/num_waiting_uncached_tokens").on("loads"),
		one(FieldRunLimit, Sum, "/loads/*/max_running_requests").on("loads"),

		one(FieldKVUsed, Mean, "/loads/*/token_usage").on("loads"),
		sglangGauge(FieldKVUsed, Mean, "sglang:token_usage"), // already the fullest of its pools

		one(FieldKVCapacity, Sum, "/loads/*/max_total_num_tokens").on("loads"),
		sglangGauge(FieldKVCapacity, Sum, "sglang:max_total_num_tokens"),
		sglangGauge(FieldKVCapacity, Sum, "sglang:num_pages").
			then(Times, Term{Names: []string{"sglang:page_size"}, Fold: Max}),

		one(FieldPrefixHitRate, Mean, "/loads/*/cache_hit_rate").on("loads"), // of the last batch
		sglangGauge(FieldPrefixHitRate, Mean, "sglang:cache_hit_rate"),

		one(FieldPromptTokens, Sum, "sglang:prompt_tokens_total"),
		one(FieldGenerationTokens, Sum, "sglang:generation_tokens_total"),
		sglangGauge(FieldPreemptions, Sum, "sglang:num_retracted_requests_total"),
		one(FieldFirstTokens, Sum, "sglang:time_to_first_token_seconds_count"),
		one(FieldProcessStart, Max, "process_start_time_seconds"),
	},
	// /health runs a one-token generation of at least 1 s when the engine idles; /ready (newer) costs nothing. From
	// SIGTERM on /health is 503 while streams finish.
	Health: []Probe{
		{Path: "/ready", Rules: []Rule{{Reply: Reply{Status: 503}, State: Draining, Before: until(Loading)}}},
		{Path: "/health", Slow: true, Rules: []Rule{{Reply: Reply{Status: 503}, State: Draining, Before: until(Loading)}}},
	},
	WarmUp:  []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
	Version: "/server_info",
	Abilities: Abilities{
		ContinueChat:        true,
		ContinueFields:      `"continue_final_message":true`,
		ContinueCompletions: true,
		Priority:            HighFirst, // unless --schedule-low-priority-values-first
		StreamUsage:         true,
		ContinuousUsage:     true,
		HeadWhenQueued:      true,
		OneTask:             true,
		Tokenize:            Tokenize{Path: "/tokenize", Field: "prompt", Extra: `"add_special_tokens":false`, Count: "/count"},
		NotRun:              []Reply{{503, "The request queue is full"}},
	},
}

// sglangRank is the label of a scheduler of its own; all other ranks and priorities are views of the same requests.
var sglangRank = []string{"dp_rank"}

func sglangGauge(f Field, fold Fold, name string) Entry {
	return one(f, fold, name).by(Max, sglangRank...)
}
