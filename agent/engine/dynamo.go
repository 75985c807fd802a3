package engine

import "github.com/grapevine-lb/grapevine/routing"

// NVIDIA Dynamo's frontend 1.6. Active and inflight both include the queued requests. Rows of model="unknown_model"
// are refused requests. /health is 200 at once, without any model: the model list is the health page.
var dynamoTable = Table{
	Kind:     Dynamo,
	Prefixes: []string{"dynamo_frontend_"},
	OwnedBy:  "nvidia",
	Pages:    []Page{{Name: mainPage, Paths: []string{"/metrics"}}},
	Entries: []Entry{
		one(FieldRunning, Sum, "dynamo_frontend_active_requests", "dynamo_frontend_inflight_requests").
			then(Minus, Term{Names: []string{"dynamo_frontend_queued_requests"}, Fold: Sum}).where(dynamoKnown),
		one(FieldWaiting, Sum, "dynamo_frontend_queued_requests").where(dynamoKnown),
		one(FieldKVCapacity, Sum, "dynamo_frontend_model_total_kv_blocks").
			then(Times, Term{Names: []string{"dynamo_frontend_model_kv_cache_block_size"}, Fold: Max}).where(dynamoKnown),
		one(FieldPromptTokens, Sum, "dynamo_frontend_input_sequence_tokens_sum").where(dynamoKnown),
		one(FieldGenerationTokens, Sum, "dynamo_frontend_output_tokens_total").where(dynamoKnown),
		one(FieldFirstTokens, Sum, "dynamo_frontend_time_to_first_token_seconds_count").where(dynamoKnown),
	},
	Health: []Probe{{Path: "/v1/models", Rules: []Rule{
		{Reply: Reply{Status: 200}, Empty: true, State: Draining, Before: until(Loading)},
	}}},
	WarmUp: []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
	Abilities: Abilities{
		ContinueCompletions:  true,
		StreamUsage:          true,
		RejectsUnknownFields: true, // priority too
		NotRun:               []Reply{{404, "Model not found"}},
	},
}

var dynamoKnown = Match{Label: "model", Value: "unknown_model", Not: true}
