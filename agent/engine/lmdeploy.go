package engine

import "github.com/grapevine-lb/grapevine/routing"

// LMDeploy (text written by its own PrometheusStatLogger, 0.18.0). Running, waiting and KV refresh every 10 s only
// (_force_log in serve/openai/api_server.py): own counts matter more. What waits in the API process comes on top of
// what waits in the engine.
var lmdeployTable = Table{
	Kind:     LMDeploy,
	Prefixes: []string{"lmdeploy:"},
	OwnedBy:  "lmdeploy",
	Pages:    []Page{{Name: mainPage, Paths: []string{"/metrics"}}},
	Entries: []Entry{
		one(FieldRunning, Sum, "lmdeploy:num_requests_running"),
		one(FieldWaiting, Sum, "lmdeploy:num_requests_waiting").
			then(Plus, Term{Names: []string{"lmdeploy:num_api_requests_waiting"}, Fold: Sum}),
		one(FieldKVUsed, Mean, "lmdeploy:gpu_cache_usage_perc"),
		one(FieldPrefixHitRate, Mean, "lmdeploy:prefix_cache_hit_rate"),
		one(FieldPromptTokens, Sum, "lmdeploy:prompt_tokens_total"),
		one(FieldGenerationTokens, Sum, "lmdeploy:generation_tokens_total"),
		one(FieldFirstTokens, Sum, "lmdeploy:time_to_first_token_seconds_count"),
		one(FieldProcessStart, Max, "process_start_time_seconds"),
	},
	Health: []Probe{{Path: "/health", Rules: []Rule{
		{Reply: Reply{200, `"sleeping"`}, State: Asleep},
	}}},
	WarmUp: []Service{routing.ServeChat, routing.ServeCompletions},
	Abilities: Abilities{
		ContinueCompletions: true,
		StreamUsage:         true,
		HeadWhenQueued:      true,
		Serves:              serveText,
	},
}
