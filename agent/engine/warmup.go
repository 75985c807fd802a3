package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/grapevine-lb/grapevine/routing"
)

// Service is a kind of request, see routing.Service.
type Service = routing.Service

// WarmUp sends the smallest valid request for one token, of the first kind that the engine answers: chat,
// completions, embeddings. It returns nil after a real answer, [ErrNotLoaded] if a request would load the model (nothing was
// sent), else an error. The first answer of a cold engine can take minutes; ctx alone bounds it. An empty model
// means the first one that the engine lists.
func (r *Reader) WarmUp(ctx context.Context, model string) error {
	st, err := r.ensure(ctx)
	if err != nil {
		return err
	}
	list, err := r.Models(ctx)
	if err != nil {
		return fmt.Errorf("warm-up: %w", err)
	}
	m, err := choose(list, model)
	if err != nil {
		return fmt.Errorf("warm-up: %w", err)
	}
	var failures []error
	for _, kind := range order(st.table.WarmUp, m) {
		err := r.warmUp(ctx, kind, m.ID)
		if err == nil {
			r.mu.Lock()
			r.warm = kind
			r.mu.Unlock()
			return nil
		}
		failures = append(failures, err)
		var wrong *wrongKind
		if !errors.As(err, &wrong) {
			break // busy, broken or gone: another kind of request would not help
		}
	}
	return fmt.Errorf("warm-up: %w", errors.Join(failures...))
}

// choose finds the model, or the first one in memory.
func choose(list []Model, id string) (Model, error) {
	for _, m := range list {
		if m.ID == id || id == "" && m.Loaded {
			if !m.Loaded {
				return m, fmt.Errorf("model %q: %w", m.ID, ErrNotLoaded)
			}
			return m, nil
		}
	}
	switch {
	case id == "" && len(list) > 0:
		return Model{}, fmt.Errorf("model %q: %w", list[0].ID, ErrNotLoaded)
	case id == "":
		return Model{}, errors.New("the engine lists no model")
	}
	return Model{}, fmt.Errorf("the engine does not list model %q", id)
}

// order puts embeddings first for a model that says it embeds.
func order(kinds []Service, m Model) []Service {
	for _, c := range m.Capabilities {
		if c == "embed" || c == "embedding" {
			return []Service{routing.ServeEmbeddings}
		}
	}
	return kinds
}

// wrongKind: the engine has no such path, or its model does not do this.
type wrongKind struct{ *StatusError }

func (w *wrongKind) Unwrap() error { return w.StatusError }

// warmUp sends one request and wants a whole answer of the right shape.
func (r *Reader) warmUp(ctx context.Context, kind Service, model string) error {
	path, body := warmUpRequest(kind, model)
	a, err := r.do(ctx, http.MethodPost, path, "application/json", body, nil)
	if err != nil {
		return err
	}
	se := &StatusError{Path: path, Status: a.status, Body: snippet(a.body)}
	switch a.status {
	case http.StatusOK:
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusUnprocessableEntity, http.StatusNotImplemented:
		return &wrongKind{se}
	default:
		return se
	}
	var reply struct {
		Object  string            `json:"object"`
		Error   json.RawMessage   `json:"error"`
		Choices []json.RawMessage `json:"choices"`
		Data    []json.RawMessage `json:"data"`
	}
	if json.Unmarshal(a.body, &reply) != nil {
		return fmt.Errorf("%s: the answer is not JSON: %s", path, se.Body)
	}
	// vLLM up to 0.9 answers 200 with an error object where the model cannot do this.
	if hasError := len(reply.Error) > 0 && string(reply.Error) != "null"; hasError || strings.EqualFold(reply.Object, "error") {
		return &wrongKind{se}
	}
	if len(reply.Choices)+len(reply.Data) == 0 {
		return fmt.Errorf("%s: an answer without content: %s", path, se.Body)
	}
	return nil
}

// warmUpRequest is the smallest request that is valid everywhere: one word in, one token out, no optional field.
func warmUpRequest(kind Service, model string) (path string, body []byte) {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var v any
	switch kind {
	case routing.ServeCompletions:
		path = "/v1/completions"
		v = struct {
			Model     string `json:"model"`
			Prompt    string `json:"prompt"`
			MaxTokens int    `json:"max_tokens"`
		}{model, "hi", 1}
	case routing.ServeEmbeddings:
		path = "/v1/embeddings"
		v = struct {
			Model string `json:"model"`
			Input string `json:"input"`
		}{model, "hi"}
	default:
		path = "/v1/chat/completions"
		v = struct {
			Model     string    `json:"model"`
			Messages  []message `json:"messages"`
			MaxTokens int       `json:"max_tokens"`
		}{model, []message{{"user", "hi"}}, 1}
	}
	body, err := json.Marshal(v)
	if err != nil { // strings and numbers only
		panic(err)
	}
	return path, body
}

// CountTokens counts the tokens of a text with the engine's own tokenizer; [errors.ErrUnsupported] if it has none.
func (r *Reader) CountTokens(ctx context.Context, model, text string) (int, error) {
	st, err := r.ensure(ctx)
	if err != nil {
		return 0, err
	}
	t := st.table.Abilities.Tokenize
	if t.Path == "" {
		return 0, fmt.Errorf("count tokens: %w", errors.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.timeout())
	defer cancel()
	body, err := t.Body(model, text)
	if err != nil {
		return 0, err
	}
	a, err := r.do(ctx, http.MethodPost, t.Path, "application/json", body, nil)
	if err != nil {
		return 0, fmt.Errorf("count tokens: %w", err)
	}
	if a.status != http.StatusOK {
		return 0, fmt.Errorf("count tokens: %w", &StatusError{Path: t.Path, Status: a.status, Body: snippet(a.body)})
	}
	return countTokens(t, a.body)
}

func countTokens(t Tokenize, body []byte) (int, error) {
	var root any
	if err := json.Unmarshal(body, &root); err != nil {
		return 0, fmt.Errorf("count tokens: %s: %w", t.Path, err)
	}
	n := -1
	pointer := t.Count
	if pointer == "" {
		pointer = t.List
	}
	walk(root, root, pointerTokens(pointer), func(v, _ any) {
		switch x := v.(type) {
		case float64:
			n = int(x)
		case []any:
			n = len(x)
		}
	})
	if n < 0 {
		return 0, fmt.Errorf("count tokens: %s: no count in %s", t.Path, snippet(body))
	}
	return n, nil
}
