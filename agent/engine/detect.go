package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// detectPaths are where engines keep Prometheus pages. /metrics of trtllm-serve is a list of statistics that is
// drained by reading; one look is the price of finding out.
var detectPaths = []string{"/metrics", "/prometheus/metrics", "/v1/metrics"}

// Detect finds out what the engine is, from the most certain evidence to the least: the prefix of its metrics, its
// Server header, owned_by in its model list, and its greeting. A configured kind is believed. An engine that has a
// model list but no other sign is [OpenAI]. An error means that nothing can be said yet.
func (r *Reader) Detect(ctx context.Context) (Kind, error) {
	if r.err != nil {
		return Auto, r.err
	}
	if r.res.kind != Auto {
		r.readVersion(ctx)
		return r.res.kind, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 4*r.cfg.timeout())
	defer cancel()
	t, evidence, err := r.lookAround(ctx)
	r.mu.Lock()
	r.looked = time.Now()
	r.mu.Unlock()
	if err != nil {
		return Auto, fmt.Errorf("detect engine: %w", err)
	}
	r.use(t, evidence)
	r.mu.Lock()
	if r.gone {
		r.gone, r.version, r.warm = false, "", 0 // if it is the same kind, it may be another release or model
	}
	r.mu.Unlock()
	r.readVersion(ctx)
	return t.Kind, nil
}

func (r *Reader) lookAround(ctx context.Context) (*Table, string, error) {
	paths := detectPaths
	if r.res.metrics != nil {
		paths = []string{r.res.metrics.String()}
	}
	if r.res.off {
		paths = nil
	}
	server := ""
	for _, path := range paths {
		a, err := r.detectGet(ctx, path)
		if err != nil {
			return nil, "", err
		}
		if server == "" {
			server = a.server
		}
		if a.status != http.StatusOK {
			continue
		}
		if t, prefix := byPrefix(a.body); t != nil {
			if path == "/v1/metrics" { // newer NIM images run vLLM inside
				t = &nimTable
			}
			return t, fmt.Sprintf("%s has %s metrics", path, prefix), nil
		}
	}
	a, err := r.detectGet(ctx, "/v1/models")
	if err != nil {
		return nil, "", err
	}
	if server == "" {
		server = a.server
	}
	if server == "llama.cpp" {
		return &llamacppTable, "Server: llama.cpp", nil
	}
	if a.status == http.StatusOK {
		for _, t := range tables {
			if t.OwnedBy != "" && ownedBy(a.body) == t.OwnedBy {
				return t, "/v1/models is owned by " + t.OwnedBy, nil
			}
		}
	}
	if g, err := r.detectGet(ctx, "/"); err == nil && g.status == http.StatusOK && bytes.HasPrefix(g.body, []byte("Ollama is running")) {
		return &ollamaTable, "/ says that Ollama is running", nil
	}
	if h, err := r.detectGet(ctx, "/v2/health/ready"); err == nil && h.status == http.StatusOK {
		return &tritonTable, "/v2/health/ready answers", nil
	}
	switch {
	case a.status == http.StatusOK:
		return &openaiTable, "/v1/models answers, nothing says whose", nil
	case a.status >= 500:
		return nil, "", &StatusError{Path: "/v1/models", Status: a.status, Body: snippet(a.body)}
	}
	if i, err := r.detectGet(ctx, "/info"); err == nil && i.status == http.StatusOK {
		if t := byInfo(i.body); t != nil {
			return t, "/info describes a model", nil
		}
	}
	return nil, "", &StatusError{Path: "/v1/models", Status: a.status, Body: snippet(a.body)}
}

func (r *Reader) detectGet(ctx context.Context, path string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.timeout())
	defer cancel()
	return r.get(ctx, path, "*/*", nil)
}

// byPrefix finds the table whose prefix the first matching family on the page has. HELP and TYPE lines count too: a
// fresh trtllm-serve has nothing else.
func byPrefix(page []byte) (*Table, string) {
	for len(page) > 0 {
		line := page
		if i := bytes.IndexByte(page, '\n'); i >= 0 {
			line, page = page[:i], page[i+1:]
		} else {
			page = nil
		}
		for _, intro := range []string{"# TYPE ", "# HELP "} {
			line = bytes.TrimPrefix(line, []byte(intro))
		}
		for _, t := range tables {
			for _, p := range t.Prefixes {
				if bytes.HasPrefix(line, []byte(p)) {
					return t, p
				}
			}
		}
	}
	return nil, ""
}

// ownedBy is the owner of the first model in a model list.
func ownedBy(body []byte) string {
	var list struct {
		Data []struct {
			OwnedBy string `json:"owned_by"`
		} `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil || len(list.Data) == 0 {
		return ""
	}
	return list.Data[0].OwnedBy
}

// byInfo tells TGI from TEI by their description of the model.
func byInfo(body []byte) *Table {
	var i struct {
		ModelID     string          `json:"model_id"`
		MaxTotal    json.RawMessage `json:"max_total_tokens"`
		MaxBatchReq json.RawMessage `json:"max_batch_requests"`
		ModelType   json.RawMessage `json:"model_type"`
	}
	switch {
	case json.Unmarshal(body, &i) != nil || i.ModelID == "":
		return nil
	case i.MaxTotal != nil:
		return &tgiTable
	case i.ModelType != nil:
		return &teiTable
	}
	return nil
}

// readVersion asks for the version where the table knows a page for it; without an answer the old one stays.
func (r *Reader) readVersion(ctx context.Context) {
	st := r.current()
	if st == nil || st.table.Version == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.timeout())
	defer cancel()
	a, err := r.get(ctx, st.table.Version, "application/json", nil)
	if err != nil || a.status != http.StatusOK {
		return
	}
	var v map[string]any
	if json.Unmarshal(a.body, &v) != nil {
		return
	}
	for _, key := range []string{"version", "build_info", "sglang_version"} {
		if s, ok := v[key].(string); ok && s != "" {
			r.mu.Lock()
			r.version = strings.TrimSpace(s)
			r.mu.Unlock()
			return
		}
	}
}
