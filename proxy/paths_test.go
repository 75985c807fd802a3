package proxy

import (
	"encoding/json"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		method, path string
		want         pathClass
	}{
		{"POST", "/v1/chat/completions", pathClass{Kind: pathInference, Service: routing.ServeChat, Route: "/v1/chat/completions"}},
		{"POST", "/v1/completions", pathClass{Kind: pathInference, Service: routing.ServeCompletions, Route: "/v1/completions"}},
		{"POST", "/v1/responses", pathClass{Kind: pathInference, Service: routing.ServeResponses, Route: "/v1/responses"}},
		{"POST", "/v1/messages", pathClass{Kind: pathInference, Service: routing.ServeMessages, Route: "/v1/messages"}},
		{"POST", "/v1/embeddings", pathClass{Kind: pathInference, Service: routing.ServeEmbeddings, Route: "/v1/embeddings", Ungated: true}},
		{"POST", "/rerank", pathClass{Kind: pathInference, Service: routing.ServeRerank, Route: "/rerank", Ungated: true}},
		{"POST", "/v1/audio/transcriptions", pathClass{Kind: pathInference, Service: routing.ServeAudio, Route: "/v1/audio/transcriptions", Ungated: true}},
		{"GET", "/v1/realtime", pathClass{Kind: pathInference, Service: routing.ServeAudio, Route: "/v1/realtime", Ungated: true}},
		{"POST", "/v1/new/thing", pathClass{Kind: pathInference, Service: routing.ServeOther, Route: "/v1/*", Ungated: true}},
		// C20: a doubled slash is the same path, without a redirect.
		{"POST", "//v1/chat/completions", pathClass{Kind: pathInference, Service: routing.ServeChat, Route: "/v1/chat/completions"}},
		{"POST", "/v1//chat/completions/", pathClass{Kind: pathInference, Service: routing.ServeChat, Route: "/v1/chat/completions"}},
		// C21: both spellings name the same model.
		{"GET", "/v1/models", pathClass{Kind: pathModels, Route: "/v1/models"}},
		{"GET", "/v1/models/org%2Fmodel-7b", pathClass{Kind: pathModels, Route: "/v1/models/{id}", Object: "org/model-7b"}},
		{"GET", "/v1/models/org/model-7b", pathClass{Kind: pathModels, Route: "/v1/models/{id}", Object: "org/model-7b"}},
		{"GET", "/v1/responses/resp_1", pathClass{Kind: pathStateful, Service: routing.ServeOther, Route: "/v1/responses", Object: "resp_1", Ungated: true}},
		{"POST", "/v1/responses/resp_1/cancel", pathClass{Kind: pathStateful, Service: routing.ServeOther, Route: "/v1/responses", Object: "resp_1", Ungated: true}},
		{"POST", "/v1/files", pathClass{Kind: pathStateful, Service: routing.ServeOther, Route: "/v1/files", Ungated: true}},
		{"GET", "/v1/batches/b/x", pathClass{Kind: pathStateful, Service: routing.ServeOther, Route: "/v1/batches", Object: "b", Ungated: true}},
		{"GET", "/v1/chat/completions", pathClass{Kind: pathStateful, Service: routing.ServeOther, Route: "/v1/chat/completions", Ungated: true}},
		{"POST", "/inference.GRPCInferenceService/ModelInfer", pathClass{Kind: pathInference, Route: "grpc", Ungated: true}},
		{"POST", "/sleep", pathClass{Kind: pathAdmin, Route: "admin", Ungated: true}},
		{"POST", "/v1/load_lora_adapter", pathClass{Kind: pathAdmin, Route: "admin", Ungated: true}},
		{"GET", "/nothing", pathClass{Kind: pathUnknown, Route: "other", Ungated: true}},
	} {
		assert.Equal(t, c.want, classify(c.method, c.path), "%s %s", c.method, c.path)
	}
	for p := range inferencePaths {
		assert.Equal(t, p, cleanPath(p))
		assert.False(t, admin(p), p)
	}
}

// No spelling that an engine might clean reaches an administrative path.
func TestAdminPathsCannotHide(t *testing.T) {
	for _, p := range adminPaths {
		p = map[bool]string{true: p + "x", false: p}[p[len(p)-1] == '/']
		for _, spelling := range []string{p, "/" + p, p + "/", "/v1/.." + p, "/." + p, "/%" + strconv.FormatInt(int64(p[1]), 16) + p[2:], "/v1/%2e%2e" + p, p + ";x"} {
			c := classify("POST", spelling)
			assert.Equal(t, pathAdmin, c.Kind, spelling)
			assert.False(t, c.passes(spelling, nil), spelling)
		}
	}
	assert.Equal(t, pathInference, classify("POST", "/v1/sleep").Kind, "another path, whatever its last word")
}

func TestAllowedPaths(t *testing.T) {
	a, err := parseAllowedPaths(" /sleep, /my/*,, ")
	require.NoError(t, err)
	for path, want := range map[string]bool{"/sleep": true, "/my/thing": true, "/wake_up": false, "/nothing": false, "/v1/anything": true, "/sleep/x": false, "//sleep": false} {
		assert.Equal(t, want, classify("POST", path).passes(path, a), path)
	}
	for _, bad := range []string{"sleep", "/a*b", "/a?b=c", "*"} {
		_, err := parseAllowedPaths(bad)
		assert.Error(t, err, bad)
	}
}

func TestClassifyAllocatesNothing(t *testing.T) {
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		classify("POST", "/v1/chat/completions")
		classify("GET", "/v1/models")
	}))
}

func TestErrorShape(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range []*apiError{errModelNotFound, errModelUnavailable, errNoService, errTooLong, errAllFull, errNoneUsable, errDraining, errTooLarge,
		errBodyMemory, errTooManyRequests, errPathNotAllowed, errFirstByte, errBroken, errStreamBroken, errDeadly, errLoop, errBadRequest} {
		w := httptest.NewRecorder()
		e.write(w)
		assert.Equal(t, e.Status, w.Code)
		assert.NotEqual(t, 408, w.Code, "clients take 408 for their own fault and repeat at once")
		var doc struct {
			Error map[string]any
		}
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &doc))
		assert.Len(t, doc.Error, 4)
		for _, k := range []string{"message", "type", "param", "code"} {
			assert.Contains(t, doc.Error, k)
		}
		assert.NotEmpty(t, doc.Error["message"])
		assert.NotEmpty(t, doc.Error["type"])
		assert.Equal(t, e.Reason, w.Header().Get("x-grapevine-reason"))
		assert.Equal(t, strconv.Itoa(w.Body.Len()), w.Header().Get("Content-Length"))
		assert.Equal(t, e.Status == 429 || e.Status == 503, w.Header().Get("Retry-After") != "", e.Reason)
		assert.Equal(t, e.Final, w.Header().Get("x-should-retry") == "false")
		assert.False(t, seen[e.Reason], "one reason for each")
		seen[e.Reason] = true
	}
	assert.JSONEq(t, `{"error":{"message":"say \"x\"","type":"rate_limit_error","param":null,"code":null}}`, string(errorBody(429, "", "", "", `say "x"`)))
}

func TestRetryAfterIsWholeSpreadAndBounded(t *testing.T) {
	for _, c := range []struct {
		d       time.Duration
		rnd     float64
		s, msec string
	}{
		{2 * time.Second, 0.5, "2", "2000"}, {2 * time.Second, 0, "2", "1600"}, {10 * time.Second, 0.999999, "12", "11999"},
		{time.Millisecond, 0.5, "1", "1000"}, {time.Hour, 0.5, "60", "60000"},
	} {
		h := map[string]string{}
		errAllFull.with("", c.d).Headers(c.rnd, func(k, v string) { h[k] = v })
		assert.Equal(t, []string{c.s, c.msec}, []string{h["retry-after"], h["retry-after-ms"]}, "%v %v", c.d, c.rnd)
	}
}

func TestErrorEventIsOneWholeEvent(t *testing.T) {
	k := readReply(formatEvents, errStreamBroken.Event())
	assert.Equal(t, eventEnd|eventData|eventError, k.All)
	assert.True(t, k.Boundary)
	assert.Equal(t, "stream_broken", k.Error.Code)
}

// FuzzClassify: no spelling of an administrative path passes the client port. The twin cleans the path the way the laxest
// engine would.
func FuzzClassify(f *testing.F) {
	for _, s := range []string{"/v1/chat/completions", "/sleep", "//sleep", "/v1/../sleep", "/%73leep", "/sleep/", "/v1/%2e%2e/sleep", "/sleep;x=1", "/./sleep",
		"/slots/0", "/v1/models/a%2Fb", "/v1//chat//completions", "/..%2fsleep", "/v1/load_lora_adapter", "/a.b/c", "/v1/x/../load_lora_adapter"} {
		f.Add("POST", s)
	}
	f.Fuzz(func(t *testing.T, method, path string) {
		if !strings.HasPrefix(path, "/") {
			return
		}
		c := classify(method, path)
		if !c.passes(path, nil) {
			return
		}
		clean := path
		if u, err := url.PathUnescape(path); err == nil {
			clean = u
		}
		var out []string
		for s := range strings.SplitSeq(clean, "/") {
			s, _, _ = strings.Cut(s, ";")
			switch {
			case s == "" || s == ".":
			case s == "..":
				out = out[:max(0, len(out)-1)]
			default:
				out = append(out, s)
			}
		}
		if clean = "/" + strings.Join(out, "/"); adminExact[clean] {
			t.Fatalf("%q passes as %s", path, c.Route)
		}
	})
}
