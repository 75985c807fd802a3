package engine

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// llama.cpp's llama-server (captured from b11434).
//
//   - /metrics is 501 without --metrics; /slots is there by default and then carries the running requests too.
//   - Both are tasks in the queue that requests use: 1.1 s was seen under load.
//   - A slot that never ran has no n_prompt_tokens, so no busy slot means 0 tokens. n_prompt_tokens of a busy slot
//     grows with the answer.
//   - prompt_tokens_seconds and predicted_tokens_seconds are averages since the last scrape, which spoils them for
//     others; only the counters are used.
//   - With --sleep-idle-seconds reading either page keeps the engine awake; GRAPEVINE_ENGINE_METRICS_URL=off leaves
//     it in peace.
var llamacppTable = Table{
	Kind:     LlamaCpp,
	Prefixes: []string{"llamacpp:"},
	OwnedBy:  "llamacpp",
	Pages: []Page{
		{Name: mainPage, Paths: []string{"/metrics"}, Hint: "start llama-server with --metrics"},
		// With --sleep-idle-seconds, /metrics and /props let it fall asleep and stay so; /slots does not.
		{Name: "props", Paths: []string{"/props"}, JSON: true, Every: 2 * time.Second},
		{Name: "slots", Paths: []string{"/slots"}, JSON: true, Every: time.Second, Wakes: true, Hint: "start llama-server with --slots"},
	},
	// It looks for a client that hung up only when nothing has happened to any request for a second, and a reading is
	// something: read each 200 ms, b11434 ran requests without a stream to their end; read each 1.5 s, it gave them up.
	Pace: 1500 * time.Millisecond,
	Entries: []Entry{
		one(FieldRunning, Sum, "llamacpp:requests_processing"),
		one(FieldRunning, Count, "/*/id").on("slots").where(busySlot).zero(),
		one(FieldWaiting, Sum, "llamacpp:requests_deferred"),
		one(FieldRunLimit, Count, "/*/id").on("slots"),
		one(FieldAsleep, Max, "/is_sleeping").on("props"),
		one(FieldKVUsed, Mean, "llamacpp:kv_cache_usage_ratio"), // older builds
		one(FieldKVUsed, Sum, "/*/n_prompt_tokens").on("slots").where(busySlot).zero().
			then(Over, Term{Names: []string{"/*/n_ctx"}, Fold: Sum}),
		one(FieldKVCapacity, Sum, "/*/n_ctx").on("slots"),
		one(FieldPrefixHits, Sum, "llamacpp:prompt_tokens_cached_total"),
		one(FieldPrefixQueries, Sum, "llamacpp:prompt_tokens_cached_total").
			then(Plus, Term{Names: []string{"llamacpp:prompt_tokens_total"}, Fold: Sum}),
		one(FieldPromptTokens, Sum, "llamacpp:prompt_tokens_total"),
		one(FieldGenerationTokens, Sum, "llamacpp:tokens_predicted_total"),
	},
	Health: []Probe{{Path: "/health", Rules: []Rule{
		{Reply: Reply{503, "Loading model"}, State: Loading},
	}}},
	WarmUp:  []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
	Version: "/props",
	Abilities: Abilities{
		ContinueChat:        true,
		ContinueFields:      `"continue_final_message":true,"add_generation_prompt":false`,
		OpensLastTurn:       true, // unless started with --no-prefill-assistant
		ContinueCompletions: true,
		AbortByReset:        true, // after a plain close a non-streaming request ran on for 40 s
		StreamUsage:         true,
		AnyModel:            true,
		WakesByItself:       true,
		Tokenize:            Tokenize{Path: "/tokenize", Field: "content", List: "/tokens"},
		NotRun:              []Reply{{503, "Loading model"}},
	},
}

var busySlot = Match{Label: "is_processing", Value: "true"}
