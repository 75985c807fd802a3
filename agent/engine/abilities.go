package engine

import (
	"strings"

	"github.com/grapevine-lb/grapevine/routing"
)

// Priority says which end of the request field priority comes first.
type Priority uint8

const (
	NoPriority Priority = iota
	LowFirst            // vLLM: lower is earlier
	HighFirst           // SGLang: higher is earlier
)

// Abilities is what a forwarder must know about an engine beyond its load.
type Abilities struct {
	// ContinueChat: a trailing assistant message can be continued exactly with ContinueFields added to the body.
	ContinueChat bool
	// ContinueFields is JSON without the braces, "" if the engine continues by itself.
	ContinueFields string
	// OpensLastTurn: a trailing assistant message is taken for an open turn without any field.
	OpensLastTurn bool
	// ContinueCompletions: a completion goes on when its text is appended to the prompt.
	ContinueCompletions bool
	// AbortByReset: a non-streaming request is given up only when its connection is reset (SO_LINGER 0); a plain
	// close goes unnoticed.
	AbortByReset bool
	Priority     Priority
	// StreamUsage: stream_options.include_usage is understood; ContinuousUsage: also continuous_usage_stats.
	StreamUsage, ContinuousUsage bool
	// RejectsUnknownFields: a field that the engine does not know is a 400.
	RejectsUnknownFields bool
	// AnyModel: an unknown model name is answered with the engine's own model, status 200.
	AnyModel bool
	// HeadWhenQueued: the head of a stream is sent as soon as the request waits; otherwise when it starts.
	HeadWhenQueued bool
	// CountsLate: its numbers move only when a request ends, so that their standing still means nothing.
	CountsLate bool
	// Tokenize counts tokens, see Reader.CountTokens.
	Tokenize Tokenize
	// Serves are the kinds of path the engine may have at all; 0 unknown.
	Serves routing.Service
	// OneTask: a model that generates text does not embed or rank, and the other way round.
	OneTask bool
	// WakesByItself: an engine that sleeps is woken by the next request, so that it may still be sent some; but nobody
	// should ask it for anything else.
	WakesByItself bool
	// NotRun and Dead describe replies, see IsNotRun and IsDead.
	NotRun, Dead []Reply
}

// Reply describes a reply of the engine by status and a part of its body.
type Reply struct {
	Status int    // 0: any
	Text   string // "" matches any body
}

func (r Reply) matches(status int, body []byte) bool {
	return (r.Status == 0 || r.Status == status) && (r.Text == "" || strings.Contains(string(body), r.Text))
}

// IsNotRun tells whether a reply means that the request surely was not started, so that it may go elsewhere. Busy
// replies count: 429, and 503 unless the engine is dead.
func (a *Abilities) IsNotRun(status int, body []byte) bool {
	if status == 429 || status == 503 && !a.IsDead(status, body) {
		return true
	}
	return anyMatch(a.NotRun, status, body)
}

// IsDead tells whether a reply, or the error object of a stream (status 200), means that the engine behind the API
// has died.
func (a *Abilities) IsDead(status int, body []byte) bool { return anyMatch(a.Dead, status, body) }

func anyMatch(list []Reply, status int, body []byte) bool {
	for _, r := range list {
		if r.matches(status, body) {
			return true
		}
	}
	return false
}

// Tokenize describes a page that counts tokens; zero if there is none.
type Tokenize struct {
	Path  string // "" if there is none
	Field string // that takes the text
	Extra string // more JSON members, without braces
	Count string // JSON pointer to the number, "" if List
	List  string // JSON pointer to the list of tokens
}

// embeds is what a model that embeds answers, generates what one that generates does not.
const embeds = routing.ServeEmbeddings | routing.ServeRerank

const serveText = routing.ServeChat | routing.ServeCompletions | routing.ServeTokenize | routing.ServeOther
