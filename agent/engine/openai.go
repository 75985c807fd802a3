package engine

import "github.com/grapevine-lb/grapevine/routing"

// Any other server with the OpenAI API: healthy if it lists models, load unknown unless a custom mapping says where
// it is. Nothing is taken for granted.
var openaiTable = Table{
	Kind:   OpenAI,
	Pages:  []Page{{Name: mainPage, Paths: []string{"/metrics"}}}, // read only if a custom mapping wants it
	Health: []Probe{{Path: "/v1/models"}},
	WarmUp: []Service{routing.ServeChat, routing.ServeCompletions, routing.ServeEmbeddings},
}
