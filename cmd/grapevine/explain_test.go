package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const explanation = `{"model":"m","prompt_tokens":900,"class":2,"policy":"auto","decision":"b.2","reason":"best","score_ms":450,"runner_up":"a.1","runner_up_ms":900,
 "asked":["a.1","b.2"],"candidates":[{"node":"b.2","state":"ready","age_ms":80,"cached_tokens":512,"score_ms":450,"terms":{"prefill_s":0.45,"slowness":1,"slow_start":1}},
 {"node":"a.1","self":true,"state":"ready","excluded":"tried before","age_ms":null,"score_ms":900,"terms":{"queue_s":0.45,"prefill_s":0.45,"slowness":2,"slow_start":0.5}}]}`

func TestExplain(t *testing.T) {
	var asked, bodies []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		asked, bodies = append(asked, r.Method+" "+r.URL.RequestURI()), append(bodies, string(b))
		switch r.URL.Path {
		case "/explain":
			_, _ = io.WriteString(w, explanation)
		default:
			if r.FormValue("id") == "gv-1" {
				_, _ = io.WriteString(w, `[{"id":"gv-1","role":"entry","model":"m","candidates":2,"attempts":[{"node":"b.2","reason":"best","score_ms":450,"runner_up":"a.1","runner_up_ms":900,"result":"ok","asked":1,"answered":1}],"outcome":"ok","status":200,"ttft_ms":470,"duration_ms":2000}]`)
				return
			}
			_, _ = io.WriteString(w, `[]`)
		}
	}))
	defer srv.Close()
	file := filepath.Join(t.TempDir(), "request.json")
	require.NoError(t, os.WriteFile(file, []byte(`{"model":"m"}`), 0o600))
	code, out, errOut := run(nil, "explain", "--url", srv.URL, file)
	require.Zero(t, code, errOut)
	assert.Contains(t, out, "decision  b.2, by policy auto: best, 450 ms to its first token")
	assert.Contains(t, out, "runner-up a.1, 900 ms")
	assert.Contains(t, out, "tried before")
	assert.Contains(t, out, "80 ms")
	assert.Contains(t, out, "4.00", "slowness by slow start")
	code, out, errOut = run(nil, "explain", "gv-1", "--url", srv.URL)
	require.Zero(t, code, errOut)
	assert.Contains(t, out, "attempt 1 b.2: best, predicted 450 ms")
	assert.Contains(t, out, "outcome   ok, status 200, first token after 470 ms")
	code, _, errOut = run(nil, "explain", "gv-2", "--url", srv.URL)
	assert.Equal(t, 1, code)
	assert.Contains(t, errOut, "none of the last requests")
	code, _, errOut = run(nil, "explain", "missing.json", "--url", srv.URL)
	assert.Equal(t, 1, code)
	assert.Contains(t, errOut, "missing.json")
	code, _, _ = run(nil, "explain", "--url", srv.URL, "--model", "m", "--tokens", "5")
	assert.Zero(t, code)
	assert.Equal(t, []string{"POST /explain?path=%2Fv1%2Fchat%2Fcompletions", "GET /picks?id=gv-1", "GET /picks?id=gv-2", "GET /explain?model=m&tokens=5"}, asked)
	assert.JSONEq(t, `{"model":"m"}`, bodies[0])
}
