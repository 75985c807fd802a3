package enginesim

import (
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

type route struct {
	method  string
	handler http.HandlerFunc
}

func (s *Server) allRoutes() map[string]route {
	rs := map[string]route{
		"/health":              {"GET", s.health},
		"/metrics":             {"GET", s.metrics},
		"/v1/models":           {"GET", s.page(s.dialect.models)},
		"/v1/chat/completions": {"POST", s.chat},
		"/v1/completions":      {"POST", s.completions},
		"/v1/responses":        {"POST", s.respond},
		"/tokenize":            {"POST", s.tokenize},
	}
	if s.cfg.Embeddings {
		rs["/v1/embeddings"] = route{"POST", s.embeddings}
	}
	for path, r := range s.dialect.routes() {
		rs[path] = r
	}
	return rs
}

// ServeHTTP answers as the engine does.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch path := r.URL.Path; {
	case path == "/fault":
		s.serveFault(w, r)
		return
	case path == "/journal":
		s.serveJournal(w, r)
		return
	case path == "/state":
		s.serveState(w, r)
		return
	case s.gone():
		reset(r)
	}
	if s.hangs() {
		s.hold(r)
	}
	if s.loads() {
		s.refuse(w, problem{kind: loading})
		return
	}
	rt, ok := s.routes[r.URL.Path]
	if id, found := strings.CutPrefix(r.URL.Path, "/v1/responses/"); found && !ok {
		rt, ok = route{"GET", func(w http.ResponseWriter, _ *http.Request) { s.stored(w, id) }}, true
	}
	head := r.Method == http.MethodHead && s.dialect.name() == "llamacpp"
	switch {
	case !ok:
		s.refuse(w, problem{kind: notFound})
	case r.Method != rt.method && !(head && rt.method == http.MethodGet):
		if s.dialect.name() != "llamacpp" {
			w.Header().Set("Allow", rt.method)
		}
		s.refuse(w, problem{kind: wrongMethod})
	case s.cfg.APIKey != "" && strings.HasPrefix(r.URL.Path, "/v1/") && r.Header.Get("Authorization") != "Bearer "+s.cfg.APIKey:
		s.refuse(w, problem{kind: unauthorized})
	default:
		rt.handler(w, r)
	}
}

// gone reports whether the process that is played does not exist (any more).
func (s *Server) gone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dead || s.stopped
}

// hangs reports whether even pages hang.
func (s *Server) hangs() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	for _, f := range s.faults {
		if f.Kind == "hang" && f.Pages {
			return true
		}
	}
	return false
}

func (s *Server) loads() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Before(s.readyAt) || s.activeLocked("loading")
}

// hold keeps a request without a word while everything hangs.
func (s *Server) hold(r *http.Request) {
	c := &call{s: s, wake: make(chan struct{}, 1)}
	s.enter(c)
	defer s.leave(c)
	for s.hangs() {
		select {
		case <-r.Context().Done():
			panic(http.ErrAbortHandler)
		case <-c.wake:
		}
	}
	if s.gone() {
		reset(r)
	}
}

// reply sends a whole body.
func (s *Server) reply(w http.ResponseWriter, status int, contentType string, body []byte) {
	h := w.Header()
	if contentType != "" {
		h.Set("Content-Type", contentType)
	}
	s.dialect.header(h, status)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may have gone
}

func (s *Server) refuse(w http.ResponseWriter, p problem) {
	status, body := s.dialect.problem(p)
	s.reply(w, status, "application/json", body)
}

func (s *Server) page(body func() []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { s.reply(w, http.StatusOK, "application/json", body()) }
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	switch {
	case s.active("unhealthy"):
		s.reply(w, http.StatusServiceUnavailable, "", nil)
	case s.dialect.name() == "llamacpp":
		s.reply(w, http.StatusOK, "application/json", []byte(`{"status":"ok"}`))
	default:
		s.reply(w, http.StatusOK, "", nil)
	}
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	typ := "text/plain; version=0.0.4; charset=utf-8"
	if s.dialect.name() == "vllm" {
		typ = "text/plain; version=1.0.0; charset=utf-8"
	}
	s.reply(w, http.StatusOK, typ, s.dialect.metrics())
}

// names are those under which the model may be called.
func (s *Server) names() []string { return append([]string{s.cfg.Model}, s.cfg.Aliases...) }

// tokenize is vLLM's and SGLang's: {"prompt"} or {"messages"}.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	var in request
	if !s.decode(w, r, &in) {
		return
	}
	var p prompt
	if len(in.Messages) > 0 {
		p = chatPrompt(&in, in.ContinueFinalMessage)
	} else if ps, err := textPrompts(in.Prompt); err == nil {
		p = ps[0]
	} else {
		s.refuse(w, problem{kind: missingField, param: "prompt"})
		return
	}
	s.reply(w, http.StatusOK, "application/json", fmt.Appendf(nil, `{"count":%d,"max_model_len":%d,"tokens":%s,"token_strs":null}`,
		tokensOf(len(p.text))+p.extra, s.params.Context, tokenList(p.text)))
}

// decode reads a JSON body, or answers why it cannot.
func (s *Server) decode(w http.ResponseWriter, r *http.Request, into any) bool {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler) // the client went while it sent
	}
	if s.dialect.name() != "llamacpp" {
		if typ, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); typ != "application/json" {
			s.refuse(w, problem{kind: mediaType})
			return false
		}
	}
	if err := json.Unmarshal(body, into); err != nil {
		s.refuse(w, problem{kind: badJSON, detail: err.Error()})
		return false
	}
	return true
}
