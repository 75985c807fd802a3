package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// Model is one model or adapter that the engine lists.
type Model struct {
	ID            string
	Parent        string   // base model of an adapter, "" if this is a base model
	Aliases       []string // other names that the engine itself answers to
	ContextLength int      // tokens of one request, prompt and answer; 0 unknown
	Loaded        bool     // false only if the engine says that a request would load it
	Capabilities  []string // as the engine names them: embed, completion, ...
	Raw           json.RawMessage
}

// ModelList says where an engine lists its models.
type ModelList struct {
	Path string // default /v1/models
	Info string // page that describes the only model, for engines without a list
}

// Models asks for the engine's models, in its order and with its own fields kept in Raw. An adapter without a
// context length has its base model's.
func (r *Reader) Models(ctx context.Context) ([]Model, error) {
	st, err := r.ensure(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.timeout())
	defer cancel()
	path := st.table.Models.Path
	if path == "" {
		path = "/v1/models"
	}
	a, err := r.get(ctx, path, "application/json", nil)
	if err != nil {
		return nil, fmt.Errorf("models: %w", err)
	}
	var list []Model
	switch {
	case a.status == http.StatusOK:
		if list, err = parseModels(a.body); err != nil {
			return nil, fmt.Errorf("models: %s: %w", path, err)
		}
	case st.table.Models.Info == "" || a.status != http.StatusNotFound:
		return nil, fmt.Errorf("models: %w", &StatusError{Path: path, Status: a.status, Body: snippet(a.body)})
	}
	if st.table.Models.Info != "" {
		if list, err = r.modelInfo(ctx, st.table.Models.Info, list); err != nil {
			return nil, fmt.Errorf("models: %w", err)
		}
	}
	if st.table.LoadsOnDemand {
		if err := r.markLoaded(ctx, list); err != nil {
			return nil, fmt.Errorf("models: %w", err)
		}
	}
	if r.Version() == "" {
		r.readVersion(ctx)
	}
	return list, nil
}

// entry is the part of a list entry that we understand.
type modelEntry struct {
	ID            string          `json:"id"`
	Parent        *string         `json:"parent"`
	Aliases       []string        `json:"aliases"`
	Capabilities  []string        `json:"capabilities"`
	MaxModelLen   json.RawMessage `json:"max_model_len"`  // vLLM, SGLang
	ContextWindow json.RawMessage `json:"context_window"` // Dynamo
	Meta          struct {
		NCtx json.RawMessage `json:"n_ctx"` // llama.cpp: of one slot
	} `json:"meta"`
	Status struct {
		Value string `json:"value"` // llama.cpp as a router: loaded, unloaded, loading
	} `json:"status"`
}

// parseModels reads an OpenAI model list. Members of unexpected types are left out, not fatal.
func parseModels(body []byte) ([]Model, error) {
	var page struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return nil, err
	}
	list := make([]Model, 0, len(page.Data))
	for _, raw := range page.Data {
		var e modelEntry
		if err := json.Unmarshal(raw, &e); err != nil {
			e = modelEntry{}
			var id struct {
				ID string `json:"id"`
			}
			if json.Unmarshal(raw, &id) != nil {
				continue
			}
			e.ID = id.ID
		}
		if e.ID == "" {
			continue
		}
		m := Model{ID: e.ID, Aliases: other(e.Aliases, e.ID), Capabilities: e.Capabilities, Raw: raw, Loaded: true}
		if e.Parent != nil && *e.Parent != e.ID {
			m.Parent = *e.Parent
		}
		for _, n := range []json.RawMessage{e.MaxModelLen, e.Meta.NCtx, e.ContextWindow} {
			if v := whole(n); v > 0 {
				m.ContextLength = v
				break
			}
		}
		if v := e.Status.Value; v != "" && v != "loaded" {
			m.Loaded = false
		}
		list = append(list, m)
	}
	for i := range list {
		for j := range list {
			if list[i].ContextLength == 0 && list[i].Parent == list[j].ID {
				list[i].ContextLength = list[j].ContextLength
			}
		}
	}
	return list, nil
}

// other leaves out a name that is the id itself.
func other(aliases []string, id string) []string {
	var out []string
	for _, a := range aliases {
		if a != "" && a != id {
			out = append(out, a)
		}
	}
	return out
}

// whole reads a positive whole number, or 0.
func whole(raw json.RawMessage) int {
	var f float64
	if len(raw) == 0 || json.Unmarshal(raw, &f) != nil || f < 1 || f > 1<<40 {
		return 0
	}
	return int(f)
}

// modelInfo fills in what TGI and TEI say about their only model, and makes an entry of it if there was no list.
func (r *Reader) modelInfo(ctx context.Context, path string, list []Model) ([]Model, error) {
	a, err := r.get(ctx, path, "application/json", nil)
	if err != nil {
		return list, err
	}
	if a.status != http.StatusOK {
		if len(list) > 0 {
			return list, nil
		}
		return nil, &StatusError{Path: path, Status: a.status, Body: snippet(a.body)}
	}
	var info struct {
		ModelID   string          `json:"model_id"`
		Version   string          `json:"version"`
		MaxTotal  json.RawMessage `json:"max_total_tokens"` // TGI
		MaxInput  json.RawMessage `json:"max_input_length"` // TEI
		ModelType json.RawMessage `json:"model_type"`
	}
	if err := json.Unmarshal(a.body, &info); err != nil {
		return list, fmt.Errorf("%s: %w", path, err)
	}
	if info.Version != "" {
		r.mu.Lock()
		r.version = info.Version
		r.mu.Unlock()
	}
	if len(list) == 0 && info.ModelID != "" {
		raw, err := json.Marshal(map[string]any{"id": info.ModelID, "object": "model"})
		if err != nil {
			return list, err
		}
		list = []Model{{ID: info.ModelID, Raw: raw, Loaded: true}}
	}
	for i := range list {
		if list[i].ContextLength == 0 {
			list[i].ContextLength = max(whole(info.MaxTotal), whole(info.MaxInput))
		}
	}
	return list, nil
}

// markLoaded looks which models Ollama holds in memory.
func (r *Reader) markLoaded(ctx context.Context, list []Model) error {
	a, err := r.get(ctx, "/api/ps", "application/json", nil)
	if err != nil {
		return err
	}
	if a.status != http.StatusOK {
		return &StatusError{Path: "/api/ps", Status: a.status, Body: snippet(a.body)}
	}
	var ps struct {
		Models []struct {
			Name          string          `json:"name"`
			ContextLength json.RawMessage `json:"context_length"`
		} `json:"models"`
	}
	if err := json.Unmarshal(a.body, &ps); err != nil {
		return fmt.Errorf("/api/ps: %w", err)
	}
	for i := range list {
		list[i].Loaded = false
		for _, m := range ps.Models {
			if strings.TrimSuffix(m.Name, ":latest") == strings.TrimSuffix(list[i].ID, ":latest") {
				list[i].Loaded = true
				list[i].ContextLength = whole(m.ContextLength)
			}
		}
	}
	return nil
}
