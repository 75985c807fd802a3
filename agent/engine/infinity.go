package engine

import "github.com/grapevine-lb/grapevine/routing"

// Infinity (captured from 0.0.78, embeddings). Its Prometheus page has no load; the model list has. results_pending
// counts inputs whose result is awaited, those in the queue included, so both numbers are inputs, not requests.
var infinityTable = Table{
	Kind:    Infinity,
	OwnedBy: "infinity",
	Pages:   []Page{{Name: "models", Paths: []string{"/v1/models", "/models"}, JSON: true}},
	Entries: []Entry{
		one(FieldRunning, Sum, "/data/*/stats/results_pending").on("models").
			then(Minus, Term{Names: []string{"/data/*/stats/queue_absolute"}, Fold: Sum}),
		one(FieldWaiting, Sum, "/data/*/stats/queue_absolute").on("models"),
		one(FieldRunLimit, Sum, "/data/*/stats/batch_size").on("models"),
	},
	Health: []Probe{{Path: "/health"}},
	WarmUp: []Service{routing.ServeEmbeddings},
	Abilities: Abilities{
		AnyModel: true,
		Serves:   routing.ServeEmbeddings | routing.ServeRerank | routing.ServeOther,
	},
}
