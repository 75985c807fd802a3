package enginesim

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The files in testdata are replies of the real engines (vLLM 0.32.0 and llama.cpp b11434, taken with curl), and, for
// SGLang 0.5.23, pages written by its own collector classes.

// capture is a recorded reply.
type capture struct {
	status int
	header http.Header
	body   string
}

func readCapture(t *testing.T, path string) capture {
	t.Helper()
	b, err := os.ReadFile("testdata/" + path)
	require.NoError(t, err)
	return parseCapture(t, string(b))
}

func parseCapture(t *testing.T, s string) (c capture) {
	t.Helper()
	head, body, ok := strings.Cut(strings.ReplaceAll(s, "\r\n", "\n"), "\n\n")
	require.True(t, ok)
	lines := strings.Split(head, "\n")
	_, err := fmt.Sscanf(lines[0], "HTTP/1.1 %d", &c.status)
	require.NoError(t, err, lines[0])
	c.header = http.Header{}
	for _, l := range lines[1:] {
		k, v, _ := strings.Cut(l, ":")
		c.header.Add(k, strings.TrimSpace(v))
	}
	c.body = body
	return c
}

// skeleton is a JSON text with its values replaced by their kind; the order of the fields stays.
func skeleton(t *testing.T, text string) string {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(text))
	var out strings.Builder
	var walk func()
	walk = func() {
		tok, err := dec.Token()
		require.NoError(t, err, text)
		switch v := tok.(type) {
		case json.Delim:
			out.WriteString(v.String())
			for n := 0; dec.More(); n++ {
				if n > 0 {
					out.WriteByte(',')
				}
				if v == '{' {
					key, err := dec.Token()
					require.NoError(t, err)
					fmt.Fprintf(&out, "%v:", key)
				}
				walk()
			}
			end, err := dec.Token()
			require.NoError(t, err)
			out.WriteString(end.(json.Delim).String())
		case string:
			out.WriteString("string")
		case float64:
			out.WriteString("number")
		case bool:
			out.WriteString("bool")
		case nil:
			out.WriteString("null")
		}
	}
	walk()
	return out.String()
}

// skeletons are those of all events of a stream; equal ones in a row count once. What stands outside data lines stays.
func skeletons(t *testing.T, body string) (out []string) {
	t.Helper()
	for line := range strings.Lines(strings.TrimRight(body, "\n")) {
		line = strings.TrimRight(line, "\n")
		if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
			line = "data: " + skeleton(t, data)
		}
		if n := len(out); n < 2 || line != out[n-2] || out[n-1] != "" {
			out = append(out, line)
		} else {
			out = out[:n-1] // the blank line between two equal events
		}
	}
	return out
}

func sameHeaders(t *testing.T, want, got http.Header) {
	t.Helper()
	for _, k := range []string{"Server", "Content-Type", "Vary", "X-Accel-Buffering", "Access-Control-Allow-Origin", "Keep-Alive", "Allow"} {
		assert.Equal(t, want.Get(k), got.Get(k), "header %s", k)
	}
	assert.Equal(t, want.Get("Date") == "", got.Get("Date") == "", "Date")
}

const (
	chatBody     = `{"model":"tiny","messages":[{"role":"user","content":"Say hello"}],"max_tokens":8%s}`
	completeBody = `{"model":"tiny","prompt":"def main","max_tokens":8%s}`
	streamed     = `,"stream":true,"stream_options":{"include_usage":true}`
	continuous   = `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`
)

func TestRepliesHaveTheShapeOfTheRealOnes(t *testing.T) {
	for _, dialect := range []string{"vllm", "llamacpp"} {
		for _, c := range []struct{ file, method, path, body string }{
			{"chat-stream-usage", "POST", "/v1/chat/completions", fmt.Sprintf(chatBody, streamed)},
			{"chat-stream-usage-continuous", "POST", "/v1/chat/completions", fmt.Sprintf(chatBody, continuous)},
			{"chat", "POST", "/v1/chat/completions", fmt.Sprintf(chatBody, "")},
			{"completion-stream", "POST", "/v1/completions", fmt.Sprintf(completeBody, streamed)},
			{"completion", "POST", "/v1/completions", fmt.Sprintf(completeBody, "")},
			{"get_v1_models", "GET", "/v1/models", ""},
			{"get_health", "GET", "/health", ""},
			{"get_slots", "GET", "/slots", ""},
		} {
			file := dialect + "/" + c.file + ".txt"
			if _, err := os.Stat("testdata/" + file); err != nil {
				continue // not every engine has every page
			}
			t.Run(file, func(t *testing.T) {
				p := DefaultParams()
				p.Slots = 2
				bubble(t, ServerConfig{Dialect: dialect, Model: "tiny", Params: p}, func(h *harness) {
					want := readCapture(t, file)
					got := h.do(h.t.Context(), c.method, c.path, c.body)
					require.NoError(t, got.err)
					assert.Equal(t, want.status, got.status)
					sameHeaders(t, want.header, got.header)
					if strings.Contains(want.header.Get("Content-Type"), "event-stream") {
						assert.Equal(t, skeletons(t, want.body), skeletons(t, got.body))
					} else {
						assert.Equal(t, skeleton(t, want.body), skeleton(t, got.body))
					}
				})
			})
		}
	}
}

func readErrors(t *testing.T, file string) map[string]capture {
	t.Helper()
	b, err := os.ReadFile("testdata/" + file)
	require.NoError(t, err)
	out := map[string]capture{}
	for _, m := range regexp.MustCompile("(?s)## (.*?)\n```\n(.*?)\n```").FindAllStringSubmatch(string(b), -1) {
		out[m[1]] = parseCapture(t, m[2]+"\n\n")
	}
	return out
}

// Refusals are word for word those of the real engines, where these do not quote their parser.
func TestRefusalsAreTheRealOnes(t *testing.T) {
	long := `"` + strings.Repeat("word ", 6000*4/5) + `"`
	const chat = "/v1/chat/completions"
	requests := map[string]struct{ method, path, typ, body string }{
		"bad JSON":                                  {"POST", chat, "application/json", `{"model":"tiny","messages":[}`},
		"empty object":                              {"POST", chat, "application/json", `{}`},
		"unknown model":                             {"POST", chat, "application/json", `{"model":"no-such-model","messages":[{"role":"user","content":"x"}],"max_tokens":4}`},
		"no model field":                            {"POST", chat, "application/json", `{"messages":[{"role":"user","content":"x"}],"max_tokens":4}`},
		"messages missing":                          {"POST", chat, "application/json", `{"model":"tiny","max_tokens":4}`},
		"messages empty":                            {"POST", chat, "application/json", `{"model":"tiny","messages":[],"max_tokens":4}`},
		"context too long (prompt)":                 {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":` + long + `}],"max_tokens":4}`},
		"context too long (prompt), stream":         {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":` + long + `}],"max_tokens":4,"stream":true}`},
		"temperature -3":                            {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":4,"temperature":-3}`},
		"stream_options without stream":             {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":4,"stream_options":{"include_usage":true}}`},
		"priority 5":                                {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":4,"priority":5}`},
		"text/plain content type":                   {"POST", chat, "text/plain", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":4}`},
		"no content type":                           {"POST", chat, "", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":4}`},
		"GET on a POST route":                       {"GET", chat, "", ""},
		"unknown route":                             {"POST", "/v1/no-such-route", "application/json", "{}"},
		"HEAD /health":                              {"HEAD", "/health", "", ""},
		"unknown field":                             {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":4,"frobnicate":1}`},
		"max_tokens beyond context (vllm only)":     {"POST", chat, "application/json", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":1000000}`},
		"embeddings on a generate model (no llama)": {"POST", "/v1/embeddings", "application/json", `{"model":"tiny","input":"x"}`},
	}
	for _, dialect := range []string{"vllm", "llamacpp"} {
		t.Run(dialect, func(t *testing.T) {
			p := DefaultParams()
			p.Context = 2048
			want := readErrors(t, dialect+"/errors.md")
			bubble(t, ServerConfig{Dialect: dialect, Model: "tiny", Params: p}, func(h *harness) {
				for name, r := range requests {
					name, only, _ := strings.Cut(name, " (")
					if only == "prompt)" || only == "prompt), stream" {
						name += " (" + only
					} else if only != "" && dialect == "llamacpp" {
						continue
					}
					w, ok := want[name]
					require.True(t, ok, name)
					req, err := http.NewRequestWithContext(h.t.Context(), r.method, "http://engine"+r.path, strings.NewReader(r.body))
					require.NoError(t, err)
					if r.typ != "" {
						req.Header.Set("Content-Type", r.typ)
					}
					resp, err := h.client.Do(req)
					require.NoError(t, err)
					body := readAll(t, resp)
					assert.Equal(t, w.status, resp.StatusCode, name)
					if resp.Header.Get("Content-Type") != "" {
						sameHeaders(t, w.header, resp.Header)
					}
					switch wantBody := strings.TrimSpace(w.body); {
					case w.status == 200 && wantBody != "" && r.method != "HEAD":
						assert.Equal(t, skeleton(t, wantBody), skeleton(t, body), name)
					case strings.Contains(wantBody, "parse") || strings.Contains(wantBody, "json_invalid") || strings.Contains(wantBody, "n_prompt_tokens"):
						assert.Equal(t, skeleton(t, wantBody), skeleton(t, body), name)
					case strings.Contains(wantBody, "<dict of"):
						cut := regexp.MustCompile(`<dict of \d+ items>`)
						assert.Equal(t, cut.ReplaceAllString(wantBody, ""), cut.ReplaceAllString(body, ""), name)
					case r.method != "HEAD":
						assert.Equal(t, wantBody, body, name)
					}
				}
			})
		})
	}
}

func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

// Every family of our pages exists on the real page, with the same type, and carries the same labels for its engine.
func TestMetricsPagesUseRealNames(t *testing.T) {
	// Families that the capture lacks because its engine had seen no request, or has no such collector in that process.
	unseen := map[string]bool{
		"sglang:prompt_tokens_total": true, "sglang:generation_tokens_total": true, "sglang:cached_tokens_total": true, "sglang:num_requests_total": true,
		"sglang:time_to_first_token_seconds": true, "sglang:e2e_request_latency_seconds": true,
	}
	for _, dialect := range []string{"vllm", "sglang", "llamacpp"} {
		t.Run(dialect, func(t *testing.T) {
			b, err := os.ReadFile("testdata/" + dialect + "/families.txt")
			require.NoError(t, err)
			types := map[string]string{}
			for line := range strings.Lines(string(b)) {
				f := strings.Fields(line)
				types[f[0]] = f[1]
			}
			bubble(t, ServerConfig{Dialect: dialect}, func(h *harness) {
				require.Equal(t, 200, h.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"max_tokens":4}`).status)
				r := h.get("/metrics")
				parser := expfmt.NewTextParser(model.UTF8Validation)
				families, err := parser.TextToMetricFamilies(strings.NewReader(r.body))
				require.NoError(t, err)
				require.NotEmpty(t, families)
				for name, f := range families {
					if unseen[name] {
						continue
					}
					assert.Equal(t, types[name], strings.ToLower(f.GetType().String()), name)
				}
			})
		})
	}
}

func TestSGLangLoadsHaveTheRealShape(t *testing.T) {
	b, err := os.ReadFile("testdata/sglang/loads.json")
	require.NoError(t, err)
	var want, got struct{ Loads []map[string]any }
	require.NoError(t, json.Unmarshal(b, &want))
	bubble(t, ServerConfig{Dialect: "sglang"}, func(h *harness) {
		require.NoError(t, json.Unmarshal([]byte(h.get("/v1/loads?include=core").body), &got))
		for k, v := range got.Loads[0] {
			assert.IsType(t, want.Loads[0][k], v, k)
		}
	})
}
