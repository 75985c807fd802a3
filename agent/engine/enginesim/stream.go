package enginesim

import (
	"net/http"
	"strings"
	"time"
)

// sink writes the events of one kind of stream.
type sink struct {
	first         func(b []byte) []byte // before a choice's first token
	delta         func(b []byte, text, finish string) []byte
	finish        func(b []byte, reason string) []byte
	end           func(b []byte) []byte
	finishInDelta bool
}

// measure brings what is said about usage and time up to date; s.mu is not held.
func (c *call) measure() {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	a := &c.answer
	a.cached, a.output = 0, 0
	for _, o := range c.outputs {
		a.cached = max(a.cached, o.cached)
		a.output += o.said
		if !o.firstAt.IsZero() {
			a.promptS, a.outputS = o.firstAt.Sub(o.startedAt).Seconds(), time.Since(o.firstAt).Seconds()
		}
	}
}

// said is the number of tokens told to the client.
func (c *call) said() int {
	n := 0
	for _, o := range c.outputs {
		n += o.said
	}
	return n
}

// stream tells each token when it is there, until the end or until something breaks.
func (c *call) stream(w http.ResponseWriter, r *http.Request, k sink) {
	s, d, ctx := c.s, c.s.dialect, r.Context()
	out := http.NewResponseController(w)
	var b []byte
	begun := false
	head := func() {
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			d.header(w.Header(), http.StatusOK)
			w.WriteHeader(http.StatusOK)
			_ = out.Flush()
		}
	}
	flush := func() { // an error here is a hang-up, and the context tells of it
		if len(b) > 0 {
			head()
			_, _ = w.Write(b)
			_ = out.Flush()
			b = b[:0]
		}
	}
	comment := time.NewTimer(time.Hour)
	defer comment.Stop()
	if !d.lateHeader() {
		head()
	}
	for {
		open := false
		for _, o := range c.outputs {
			st := c.look(o)
			if st.lost {
				flush()
				c.close("lost")
				reset(r)
			}
			if st.started {
				head()
			}
			c.answer.index = o.index
			for o.said < st.tokens {
				if kind := s.strike(c.said()); kind != "" {
					c.breakStream(r, kind, head, &b, flush, k)
					return
				}
				if o.said == 0 {
					b = k.first(b)
				}
				text, reason := o.say(), ""
				c.measure()
				if st.done && o.said == st.tokens && k.finishInDelta {
					reason, o.finished = o.stop, true
				}
				if text != "" || reason != "" {
					b = k.delta(b, text, reason)
				}
			}
			if st.done && !o.finished {
				o.finished = true
				c.measure()
				b = k.finish(b, o.stop)
			}
			open = open || !o.finished
		}
		if !open {
			c.measure()
			b = k.end(b)
			c.complete()
			flush()
			return
		}
		flush()
		if kind := s.strike(c.said()); kind != "" {
			c.breakStream(r, kind, head, &b, flush, k)
			return
		}
		if s.active("silence") {
			comment.Reset(time.Second)
		}
		select {
		case <-ctx.Done():
			c.hangUp(ctx)
			panic(http.ErrAbortHandler)
		case <-comment.C:
			b = append(b, ":\n\n"...)
		case <-c.wake:
		}
	}
}

// breakStream ends a stream as the fault demands.
func (c *call) breakStream(r *http.Request, kind string, head func(), b *[]byte, flush func(), k sink) {
	switch kind {
	case "abort":
		head()
		*b = append(k.finish(*b, "abort"), doneEvent...)
		flush()
		c.abandon(kind)
	case "engine-dead":
		head()
		_, body := c.s.dialect.problem(problem{kind: engineDead})
		if c.s.dialect.name() == "sglang" { // flat in a reply, wrapped in a stream
			body = append(append([]byte(`{"error":`), body...), '}')
		}
		*b = append(event(*b, func(b []byte) []byte { return append(b, body...) }), doneEvent...)
		flush()
		c.abandon(kind)
	case "cut":
		flush()
		c.abandon(kind)
		panic(http.ErrAbortHandler)
	case "die":
		flush()
		c.s.kill()
		c.close("lost")
		reset(r)
	default: // reset
		flush()
		c.abandon(kind)
		reset(r)
	}
}

// whole waits for all tokens and answers once.
func (c *call) whole(w http.ResponseWriter, r *http.Request, body func([]choice) []byte) {
	s, ctx := c.s, r.Context()
	for {
		tokens, open := 0, false
		for _, o := range c.outputs {
			st := c.look(o)
			if st.lost {
				c.close("lost")
				reset(r)
			}
			tokens += st.tokens
			open = open || !st.done
		}
		switch kind := s.strike(tokens); kind {
		case "":
		case "abort": // what is there, with a finish reason that OpenAI does not know
			c.abandon(kind)
			for _, o := range c.outputs {
				o.stop = "abort"
			}
			s.reply(w, http.StatusOK, "application/json", body(c.choices()))
			return
		case "engine-dead":
			c.abandon(kind)
			s.refuse(w, problem{kind: engineDead})
			return
		case "cut":
			c.abandon(kind)
			panic(http.ErrAbortHandler)
		case "die":
			s.kill()
			c.close("lost")
			reset(r)
		default: // reset
			c.abandon(kind)
			reset(r)
		}
		if !open {
			choices := c.choices()
			c.complete()
			s.reply(w, http.StatusOK, "application/json", body(choices))
			return
		}
		select {
		case <-ctx.Done():
			c.hangUp(ctx)
			panic(http.ErrAbortHandler)
		case <-c.wake:
		}
	}
}

// choices are the texts of all outputs as far as they have come.
func (c *call) choices() []choice {
	var cs []choice
	for _, o := range c.outputs {
		st := c.look(o)
		var b strings.Builder
		for o.said < st.tokens {
			b.WriteString(o.say())
		}
		cs = append(cs, choice{b.String(), o.stop})
	}
	c.measure()
	return cs
}
