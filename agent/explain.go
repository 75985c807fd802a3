package agent

import (
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

const (
	maxExplained  = 16 << 20 // bytes of a request to explain
	explainedPath = "/v1/chat/completions"
)

// explainNumbers answers GET /explain?model=M&tokens=N: open to all who may read the status, since it takes and shows
// numbers only.
func (c *console) explainNumbers(w http.ResponseWriter, r *http.Request) {
	if t := r.FormValue("tokens"); t != "" {
		if n, err := strconv.Atoi(t); err != nil || n < 0 {
			http.Error(w, "tokens must be a whole number", http.StatusBadRequest)
			return
		}
	}
	writeJSON(w, c.explain(r.URL.RequestURI(), nil, nil))
}

// explainBody answers POST /explain?path=P with a request as its body: what a prompt has cached where is not for
// everybody, so it needs the right to change something.
func (c *console) explainBody(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxExplained))
	if err != nil {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	path := r.FormValue("path")
	if path == "" {
		path = explainedPath
	}
	if !strings.HasPrefix(path, "/") {
		http.Error(w, "path must begin with /", http.StatusBadRequest)
		return
	}
	writeJSON(w, c.explain(path, r.Header, append([]byte{}, body...)))
}

// explain wires the two to the proxy.
func (a *Agent) explain(target string, h http.Header, body []byte) any {
	if body != nil {
		return a.proxy.Explain(target, explainedHeader(h), body, time.Now())
	}
	u, err := url.Parse(target)
	if err != nil {
		return proxy.Explanation{}
	}
	n, _ := strconv.Atoi(u.Query().Get("tokens")) // explainNumbers has checked it
	if u.Query().Get("tokens") == "" {
		n = typicalPrompt
	}
	return a.proxy.ExplainRequest(&routing.Request{Model: u.Query().Get("model"), PromptTokens: n, Class: 2}, time.Now())
}

// explainedHeader keeps the fields by which a choice is made.
func explainedHeader(h http.Header) http.Header {
	out := http.Header{}
	for k, v := range h {
		k = strings.ToLower(k)
		if strings.HasPrefix(k, "x-grapevine-") || k == "x-session-id" || k == "content-type" || k == "content-encoding" {
			out[http.CanonicalHeaderKey(k)] = v
		}
	}
	return out
}
