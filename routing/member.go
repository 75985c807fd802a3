package routing

import "slices"

// Member is a replica's identity, from its membership tags. It changes rarely.
type Member struct {
	Boot    uint64 // the key of everything
	Node    string // unique per start
	Addr    string // host:port of the peer listener
	Zone    string
	Engine  string // kind of engine
	Version int    // protocol version, tag v
	Self    bool
}

// Model is one entry of a replica's model list.
type Model struct {
	ID            string
	ContextLength int // tokens; 0 = unknown
	Aliases       []string
}

func (m Model) equal(o Model) bool {
	return m.ID == o.ID && m.ContextLength == o.ContextLength && slices.Equal(m.Aliases, o.Aliases)
}

// Service is the set of request kinds that a replica serves; 0 means unknown and counts as all.
type Service uint32

// One bit per family of paths. A request has exactly one bit, or 0 for "do not filter".
const (
	ServeChat Service = 1 << iota
	ServeCompletions
	ServeResponses
	ServeMessages
	ServeEmbeddings
	ServeRerank
	ServeAudio
	ServeImages
	ServeTokenize
	ServeOther

	// ServeAll has all bits; unlike 0 it says that they are known.
	ServeAll = ServeOther<<1 - 1
)
