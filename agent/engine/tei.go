package engine

import "github.com/grapevine-lb/grapevine/routing"

// Text Embeddings Inference (names from core/src/queue.rs and router/src). The queue is all that it shows.
var teiTable = Table{
	Kind:     TEI,
	Prefixes: []string{"te_"},
	Pages:    []Page{{Name: mainPage, Paths: []string{"/metrics"}}},
	Entries: []Entry{
		one(FieldWaiting, Sum, "te_queue_size"),
		one(FieldPromptTokens, Sum, "te_batch_next_tokens_sum"),
		one(FieldFirstTokens, Sum, "te_request_queue_duration_count"), // once for each request that leaves the queue
	},
	Health: []Probe{{Path: "/health"}},
	Models: ModelList{Info: "/info"},
	WarmUp: []Service{routing.ServeEmbeddings},
	Abilities: Abilities{
		AnyModel: true,
		Serves:   routing.ServeEmbeddings | routing.ServeRerank | routing.ServeTokenize | routing.ServeOther,
		NotRun:   []Reply{{429, "Model is overloaded"}},
	},
}
