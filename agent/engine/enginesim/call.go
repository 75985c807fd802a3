package enginesim

import (
	"context"
	"net/http"
	"strings"
	"time"
)

// call is one HTTP request that generates: one output for each prompt and choice.
type call struct {
	s       *Server
	request *request
	answer  answer
	outputs []*output
	wake    chan struct{}
	entry   *Entry
	deadly  deadly
}

// output is one sequence of a call. The fields of the first group belong to the server's mutex, the others to the call.
type output struct {
	job                  uint64
	handle               Handle
	running, started     bool
	ended, lost          bool
	tokens, cached, slot int
	submittedAt          time.Time
	startedAt, firstAt   time.Time
	promptTokens, limit  int
	call                 *call
	index                int
	text                 text
	words                int    // words that the text consists of; the job may have one token more, the end
	stop                 string // finish reason: "length" or "stop"
	whole                string // the precomputed text, if there are stop strings
	cut                  bool   // whole is in use
	said                 int    // tokens told to the client
	finished             bool   // the client has been told the finish reason
	blocksBefore         int
}

func (c *call) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// state is a snapshot of an output for its handler.
type state struct {
	tokens        int
	started, done bool
	lost          bool
}

// look copies what the handler needs to know of an output.
func (c *call) look(o *output) state {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return state{o.tokens, o.started, o.ended && !o.lost, o.lost}
}

// plan decides how long the output will be: up to the limit, the end that the model itself would choose, or a stop string.
func (o *output) plan(limit int, mayEnd bool, mean int, stops []string) {
	o.stop, o.words, o.limit = "length", limit, limit
	if !mayEnd && len(stops) == 0 {
		return
	}
	if !mayEnd {
		mean = 0
	}
	t := o.text // a copy: what follows is looked at, not said
	t.blocks = nil
	var b strings.Builder
	for n := range limit {
		word, end := t.next(mean)
		if end {
			o.words, o.limit, o.stop = n, n+1, "stop"
			return
		}
		t.add(word)
		if len(stops) == 0 {
			continue
		}
		b.WriteString(word)
		for _, stop := range stops {
			if stop == "" {
				continue
			}
			if i := strings.Index(b.String(), stop); i >= 0 {
				o.whole, o.cut = b.String()[:i], true
				o.words, o.limit, o.stop = n+1, n+1, "stop"
				return
			}
		}
	}
}

// say returns the text of the next token. A token after the last word is the end, and has none.
func (o *output) say() string {
	i := o.said
	o.said++
	if i >= o.words {
		return ""
	}
	word, _ := o.text.next(0)
	o.text.add(word)
	if !o.cut {
		return word
	}
	from, to := i*bytesPerToken, (i+1)*bytesPerToken
	return o.whole[min(from, len(o.whole)):min(to, len(o.whole))]
}

// begin submits all outputs of a call. On error none is left at the engine.
func (s *Server) begin(c *call, each bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	each = each || s.tokenFaults() || c.deadly.phase != ""
	for _, o := range c.outputs {
		s.nextJob++
		o.job, o.slot, o.submittedAt = s.nextJob, -1, time.Now()
		h, err := s.engine.Submit(s.now(), Job{ID: o.job, Prompt: o.promptTokens, Output: o.limit, Blocks: o.text.blocks, Stream: each})
		if err != nil {
			for _, p := range c.outputs {
				s.drop(p)
			}
			return err
		}
		o.handle = h
		s.outputs[o.job] = o
	}
	s.nudge()
	return nil
}

// drop takes an output away from the engine; s.mu is held.
func (s *Server) drop(o *output) {
	if s.outputs[o.job] == o {
		o.tokens = s.engine.Tokens(o.handle)
		s.engine.Abort(s.now(), o.handle)
		s.vacate(o)
		delete(s.outputs, o.job)
		o.ended, o.lost = true, true
	}
}

// hangUp ends a call whose client has gone: at once, after the configured lag, or, where the dialect does not notice a
// plain close, never. It reports whether the job was stopped before its end.
func (c *call) hangUp(ctx context.Context) {
	s := c.s
	s.mu.Lock()
	c.entry.gone(time.Now())
	s.mu.Unlock()
	if !c.request.Stream && s.dialect.ignoresClose() && !wasReset(ctx) {
		c.outlive()
		return
	}
	if s.cfg.HangUpLag > 0 {
		c.outlast(s.cfg.HangUpLag)
	}
	c.abandon("aborted")
}

// outlive waits for the job's own end though nobody listens.
func (c *call) outlive() {
	for {
		open := false
		for _, o := range c.outputs {
			st := c.look(o)
			open = open || !st.done && !st.lost
		}
		if !open {
			c.close("unheard")
			return
		}
		<-c.wake
	}
}

// outlast lets the job go on for d, or to its end.
func (c *call) outlast(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		open := false
		for _, o := range c.outputs {
			st := c.look(o)
			open = open || !st.done && !st.lost
		}
		if !open {
			return
		}
		select {
		case <-timer.C:
			return
		case <-c.wake:
		}
	}
}

// abandon stops what is left of a call and notes why it ended.
func (c *call) abandon(outcome string) {
	s := c.s
	s.mu.Lock()
	s.advance()
	for _, o := range c.outputs {
		s.drop(o)
	}
	s.nudge()
	s.mu.Unlock()
	c.close(outcome)
}

// complete notes a call's good end and lets the prefix cache remember the answers.
func (c *call) complete() {
	s := c.s
	s.mu.Lock()
	for _, o := range c.outputs {
		if len(o.text.blocks) > o.blocksBefore {
			s.engine.Remember(s.now(), o.text.blocks)
		}
	}
	s.nudge()
	s.mu.Unlock()
	c.close("done")
}

// close writes the end of a call into the journal; only the first outcome counts.
func (c *call) close(outcome string) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	tokens := 0
	for _, o := range c.outputs {
		tokens += o.tokens
	}
	s.journal.end(c.entry, outcome, tokens, time.Now())
}

// enter registers a call, leave forgets it; in between a test sees it in Stats.
func (s *Server) enter(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[c] = struct{}{}
}

func (s *Server) leave(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.calls, c)
}

// reset ends the connection of a request so that the client sees an error: with a reset if the connection allows it,
// otherwise by closing it in the middle of the reply.
func reset(r *http.Request) {
	resetConn(r.Context())
	panic(http.ErrAbortHandler)
}
