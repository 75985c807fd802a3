package enginesim

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// chat is POST /v1/chat/completions.
func (s *Server) chat(w http.ResponseWriter, r *http.Request) {
	var req request
	if !s.decode(w, r, &req) {
		return
	}
	switch {
	case req.Messages == nil:
		s.refuse(w, problem{kind: missingField, param: "messages"})
		return
	case len(req.Messages) == 0 && s.dialect.name() != "llamacpp":
		s.refuse(w, problem{kind: badValue, detail: "Cannot apply chat template to an empty conversation. Provide at least one message."})
		return
	case req.ContinueFinalMessage && req.AddGenerationPrompt != nil && *req.AddGenerationPrompt:
		s.refuse(w, problem{kind: badValue, detail: "Cannot set both `continue_final_message` and `add_generation_prompt` to True."})
		return
	}
	p := chatPrompt(&req, req.ContinueFinalMessage || s.dialect.opensFinal())
	if c := s.newCall(w, r, &req, true, []prompt{p}, 0); c != nil {
		c.serve(w, r, p.prefix)
	}
}

// completions is POST /v1/completions.
func (s *Server) completions(w http.ResponseWriter, r *http.Request) {
	var req request
	if !s.decode(w, r, &req) {
		return
	}
	ps, err := textPrompts(req.Prompt)
	if err != nil {
		s.refuse(w, problem{kind: missingField, param: "prompt"})
		return
	}
	if c := s.newCall(w, r, &req, false, ps, s.dialect.defaultMax()); c != nil {
		prefix := ""
		if req.Echo {
			prefix = ps[0].text
		}
		c.serve(w, r, prefix)
	}
}

// newCall validates a request and hands it to the engine. It answers and returns nil if that fails.
func (s *Server) newCall(w http.ResponseWriter, r *http.Request, req *request, chat bool, prompts []prompt, unlimited int) *call {
	if req.Model == "" {
		req.Model = s.cfg.Model
	}
	known := slices.Contains(s.names(), req.Model)
	n := 1
	if req.N != nil {
		n = *req.N
	}
	limit := req.maxTokens()
	mayEnd := s.cfg.StopEarly || limit == 0
	if limit == 0 {
		limit = unlimited
	}
	strict := s.dialect.name() == "vllm"
	longest := 0
	for _, p := range prompts {
		longest = max(longest, p.tokens())
	}
	var p problem
	switch room := s.params.Context - longest; {
	case !known && s.dialect.checksModel():
		p = problem{kind: unknownModel, detail: req.Model}
	case strict && req.StreamOptions != nil && !req.Stream:
		p = problem{kind: badValue, param: "stream_options", detail: "Stream options can only be defined when `stream=True`. (parameter=stream_options)"}
	case strict && req.Temperature != nil && *req.Temperature < 0:
		p = problem{kind: badValue, param: "temperature", detail: fmt.Sprintf("temperature must be non-negative, got %.1f. (parameter=temperature, value=%.1f)", *req.Temperature, *req.Temperature)}
	case n < 1 || n*len(prompts) > 128:
		p = problem{kind: badValue, param: "n", detail: "n must be between 1 and 128"}
	case room < 1:
		p = problem{kind: promptTooLong, tokens: longest}
	case limit > room && s.dialect.name() != "llamacpp":
		p = problem{kind: outputTooLong, tokens: limit}
	default:
		if limit == 0 || limit > room {
			limit = room
		}
		c := s.makeCall(r, req, chat, prompts, n, limit, mayEnd)
		if kind, refused := s.refusal(); kind != "" {
			c.close(kind)
			s.leave(c)
			p = refused
			break
		}
		err := s.begin(c, req.Stream)
		if err == nil {
			return c
		}
		c.close("refused")
		s.leave(c)
		switch {
		case errors.Is(err, ErrBusy):
			p = problem{kind: queueFull}
		case errors.Is(err, ErrDead):
			reset(r)
		default:
			p = problem{kind: promptTooLong, tokens: longest}
		}
	}
	s.refuse(w, p)
	return nil
}

// makeCall makes a call and its outputs, one for each prompt and choice, and enters it into the journal.
func (s *Server) makeCall(r *http.Request, req *request, chat bool, prompts []prompt, n, limit int, mayEnd bool) *call {
	now := time.Now()
	c := &call{s: s, request: req, wake: make(chan struct{}, 1), deadly: s.marked(prompts)}
	c.answer = answer{chat: chat, created: now.Unix(), model: req.Model, hide: s.cfg.HideCached}
	if s.dialect.name() == "llamacpp" {
		c.answer.model = s.cfg.Model
	}
	c.answer.id = s.answerID(r, chat)
	c.answer.running = req.StreamOptions != nil && req.StreamOptions.ContinuousUsageStats
	var hash uint64
	for _, p := range prompts {
		t := newText(s.cfg.Seed, s.params.BlockTokens)
		t.add(p.text)
		hash = mix(hash) ^ t.hash
		c.answer.prompt += p.tokens()
		for i := range n {
			o := &output{call: c, index: len(c.outputs), promptTokens: p.tokens(), text: t, blocksBefore: len(t.blocks), slot: -1}
			o.text.blocks = slices.Clip(t.blocks) // choices share the prompt's blocks, not what follows
			if i > 0 {
				o.text.hash ^= mix(uint64(i))
			}
			if !req.embed {
				o.plan(limit, mayEnd, s.cfg.MeanOutput, req.stops())
			}
			c.outputs = append(c.outputs, o)
		}
	}
	c.entry = &Entry{
		RequestID: r.Header.Get("X-Request-Id"), Conn: connID(r.Context()), Path: r.URL.Path, Model: req.Model, Stream: req.Stream,
		PromptHash: strconv.FormatUint(hash, 16), PromptTokens: c.answer.prompt, MaxTokens: req.maxTokens(), Received: now.UnixNano(),
	}
	s.mu.Lock()
	s.journal.begin(c.entry)
	s.calls[c] = struct{}{}
	s.mu.Unlock()
	return c
}

// answerID is the id of a reply: vLLM takes the client's request id.
func (s *Server) answerID(r *http.Request, chat bool) string {
	s.mu.Lock()
	s.nextID++
	a := mix(s.cfg.Seed ^ s.instance<<40 ^ s.nextID)
	s.mu.Unlock()
	id := fmt.Sprintf("%016x%016x", a, mix(a))
	prefix := "chatcmpl-"
	if !chat {
		prefix = "cmpl-"
	}
	switch s.dialect.name() {
	case "sglang":
		return id
	case "llamacpp":
		return "chatcmpl-" + id
	}
	if given := r.Header.Get("X-Request-Id"); given != "" {
		return prefix + given
	}
	return prefix + id[:16]
}

// serve answers a call that the engine has taken.
func (c *call) serve(w http.ResponseWriter, r *http.Request, prefix string) {
	defer c.s.leave(c)
	d := c.s.dialect
	if !c.request.Stream {
		if !d.repeatsPrefix() && !c.request.Echo {
			prefix = ""
		}
		c.whole(w, r, func(choices []choice) []byte {
			for i := range choices {
				choices[i].text = prefix + choices[i].text
			}
			return d.whole(nil, &c.answer, choices)
		})
		return
	}
	c.stream(w, r, sink{
		first: func(b []byte) []byte {
			if c.answer.chat {
				return d.role(b, &c.answer)
			}
			if c.request.Echo {
				return d.delta(b, &c.answer, prefix, "")
			}
			return b
		},
		delta:         func(b []byte, text, finish string) []byte { return d.delta(b, &c.answer, text, finish) },
		finish:        func(b []byte, reason string) []byte { return d.finish(b, &c.answer, reason) },
		finishInDelta: d.finishInDelta(),
		end: func(b []byte) []byte {
			if o := c.request.StreamOptions; o != nil && o.IncludeUsage {
				b = d.usage(b, &c.answer)
			}
			return append(b, doneEvent...)
		},
	})
}
