package engine

import "github.com/grapevine-lb/grapevine/routing"

// Ollama (server/routes.go). No load page in any release, so only own counts tell how busy it is. It lists every
// model on its disk and loads one on first use: a warm-up is sent only to a model that /api/ps shows in memory.
var ollamaTable = Table{
	Kind:    Ollama,
	OwnedBy: "library",
	Pages:   []Page{{Name: "ps", Paths: []string{"/api/ps"}, JSON: true}},
	Entries: []Entry{
		one(FieldModelsLoaded, Count, "/models/*/name").on("ps").zero(),
	},
	Health:        []Probe{{Path: "/"}},
	WarmUp:        []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
	LoadsOnDemand: true,
	Version:       "/api/version",
	Abilities: Abilities{
		ContinueCompletions: false, // /v1/completions applies a template
		StreamUsage:         true,
		NotRun:              []Reply{{503, "server busy"}},
	},
}
