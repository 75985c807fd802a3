package enginesim

import (
	"encoding/json"
	"io"
	"net/http"
	"time"
)

// Entry is one run of a request, as GET /journal lists it. Times are Unix nanoseconds, 0 for what has not happened.
type Entry struct {
	Run          uint64 `json:"run"` // counts from 1
	RequestID    string `json:"request_id,omitempty"`
	Conn         uint64 `json:"conn,omitempty"` // number of the connection; 0 if the server does not see it
	Path         string `json:"path"`
	Model        string `json:"model"`
	Stream       bool   `json:"stream"`
	PromptHash   string `json:"prompt_hash"` // of everything the model sees, a given beginning of the answer included
	PromptTokens int    `json:"prompt_tokens"`
	MaxTokens    int    `json:"max_tokens"`
	Cached       int    `json:"cached_tokens"`
	Tokens       int    `json:"tokens"` // generated
	Received     int64  `json:"received_ns"`
	Started      int64  `json:"started_ns"` // left the engine's queue
	First        int64  `json:"first_ns"`   // first token
	Gone         int64  `json:"gone_ns"`    // the client's hang-up was noticed
	End          int64  `json:"end_ns"`     // nothing of it is at the engine any more
	// Outcome is "running" until the end; then "done", "aborted" (the client hung up), "unheard" (it ran to its end for
	// nobody), "lost" (the engine died), "refused" (the queue was full), or the kind of the fault that ended or refused it.
	Outcome string `json:"outcome"`
}

func (e *Entry) started(o *output) {
	if e.Started == 0 {
		e.Started, e.Cached = o.startedAt.UnixNano(), o.cached
	}
}

func (e *Entry) first(o *output) {
	if e.First == 0 {
		e.First = o.firstAt.UnixNano()
	}
}

func (e *Entry) gone(at time.Time) {
	if e.Gone == 0 {
		e.Gone = at.UnixNano()
	}
}

// journal keeps the newest entries; the server's mutex guards it.
type journal struct {
	size    int
	w       io.Writer
	runs    uint64
	entries []*Entry
}

func (j *journal) begin(e *Entry) {
	j.runs++
	e.Run, e.Outcome = j.runs, "running"
	if len(j.entries) >= j.size {
		n := copy(j.entries, j.entries[j.size/10+1:])
		clear(j.entries[n:])
		j.entries = j.entries[:n]
	}
	j.entries = append(j.entries, e)
	j.write(e)
}

func (j *journal) end(e *Entry, outcome string, tokens int, at time.Time) {
	if e.Outcome != "running" {
		return
	}
	e.Outcome, e.Tokens, e.End = outcome, tokens, at.UnixNano()
	j.write(e)
}

// write appends a line: one at the start of a run, with the outcome "running", and one at its end.
func (j *journal) write(e *Entry) {
	if j.w == nil {
		return
	}
	if b, err := json.Marshal(e); err == nil {
		_, _ = j.w.Write(append(b, '\n')) // a full disk must not stop the engine
	}
}

// Journal returns a copy of the entries kept, oldest first.
func (s *Server) Journal() []Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.nudge()
	out := make([]Entry, len(s.journal.entries))
	for i, e := range s.journal.entries {
		out[i] = *e
	}
	for c := range s.calls {
		if e := c.entry; e != nil && e.Outcome == "running" {
			tokens := 0
			for _, o := range c.outputs {
				tokens += max(o.tokens, s.engine.Tokens(o.handle))
			}
			for i := range out {
				if out[i].Run == e.Run {
					out[i].Tokens = tokens
				}
			}
		}
	}
	return out
}

func (s *Server) serveJournal(w http.ResponseWriter, _ *http.Request) {
	b, err := json.Marshal(s.Journal())
	if err != nil {
		b = []byte("[]")
	}
	s.reply(w, http.StatusOK, "application/json", b)
}
