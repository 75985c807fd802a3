package agent

import (
	"slices"

	"github.com/grapevine-lb/grapevine/routing"
)

// serviceNames are the kinds of path, as status shows them and as agents tell each other. An agent of a later version
// may know more; what it says beyond is left out.
var serviceNames = []struct {
	bit  routing.Service
	name string
}{
	{routing.ServeChat, "chat"}, {routing.ServeCompletions, "completions"}, {routing.ServeResponses, "responses"},
	{routing.ServeMessages, "messages"}, {routing.ServeEmbeddings, "embeddings"}, {routing.ServeRerank, "rerank"},
	{routing.ServeAudio, "audio"}, {routing.ServeImages, "images"}, {routing.ServeTokenize, "tokenize"}, {routing.ServeOther, "other"},
}

// servesNames lists the kinds; none for 0, which means that they are not known.
func servesNames(s routing.Service) []string {
	out := []string{}
	for _, n := range serviceNames {
		if s&n.bit != 0 {
			out = append(out, n.name)
		}
	}
	return out
}

func servesFrom(names []string) routing.Service {
	var s routing.Service
	for _, n := range serviceNames {
		if slices.Contains(names, n.name) {
			s |= n.bit
		}
	}
	return s
}
