package proxy

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// peek reads body in pieces that end at the given offsets.
func peek(svc routing.Service, contentType, encoding string, salt *PrefixSalt, body []byte, cuts ...int) (Peek, error) {
	p := NewPeeker(svc, contentType, encoding, salt)
	defer p.Close()
	from := 0
	for _, c := range append(cuts, len(body)) {
		_, _ = p.Write(body[from:c])
		from = c
	}
	return p.Done()
}

func peekChat(t *testing.T, body string) Peek {
	t.Helper()
	k, err := peek(routing.ServeChat, "application/json", "", NewPrefixSalt([]byte("k")), []byte(body))
	require.NoError(t, err, body)
	return k
}

func TestPeekCaseFilesC25C27C28C29C111(t *testing.T) {
	var expected map[string]struct {
		Model   string
		Headers map[string]string
	}
	b, err := os.ReadFile("testdata/bodies/expected.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &expected))
	require.Len(t, expected, 9)
	for name, want := range expected {
		body, err := os.ReadFile(filepath.Join("testdata/bodies", name))
		require.NoError(t, err)
		ct := "application/json"
		if h := want.Headers["Content-Type"]; h != "" {
			ct = h
		}
		model, has := want.Model, true
		switch want.Model {
		case "absent":
			model, has = "", false
		case "m or absent":
			model = "m"
		}
		for cut := range body {
			k, err := peek(routing.ServeChat, ct, "", nil, body, cut)
			if name == "broken.json" {
				require.ErrorIs(t, err, errPeekJSON)
			} else {
				require.NoError(t, err, name)
			}
			require.Equal(t, model, k.Model, "%s cut at %d", name, cut)
			require.Equal(t, has, k.HasModel, name)
		}
		every := make([]int, len(body))
		for i := range every {
			every[i] = i
		}
		k, _ := peek(routing.ServeChat, ct, "", nil, body, every...)
		require.Equal(t, model, k.Model, "%s byte by byte", name)
		if name == "model-last.json" || name == "stream-string.json" {
			assert.True(t, k.Stream, name)
		}
	}
}

func TestPeekC25ModelBehindTwentyMegabytes(t *testing.T) {
	body := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat(`text with \"model\":\"m-fake\" } `, 20<<20/32) + `"}],"model":"m-top"}`)
	for _, piece := range []int{len(body), 64 << 10, 1000} {
		p := NewPeeker(routing.ServeChat, "application/json", "", nil)
		for b := body; len(b) > 0; {
			n := min(piece, len(b))
			_, _ = p.Write(b[:n])
			b = b[n:]
		}
		k, err := p.Done()
		p.Close()
		require.NoError(t, err)
		require.Equal(t, "m-top", k.Model)
	}
}

func TestPeekC30BrokenBodiesAreNeverRefused(t *testing.T) {
	for _, body := range []string{"", "[]", "plain text", "{", `{"model"`, `{"model":}`, `{"a":1,}`, "null", `"x"`, "12", `{"model":"m"} x`, `{"model":"m"`, `{"\q":1}`} {
		_, err := peek(routing.ServeChat, "application/json", "", nil, []byte(body))
		assert.ErrorIs(t, err, errPeekJSON, body)
	}
}

func TestPeekC26Encodings(t *testing.T) {
	plain := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat("lorem ipsum ", 9000) + `"}],"model":"m-zip"}`)
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write(plain)
	require.NoError(t, w.Close())
	zipped := z.Bytes()
	for cut := 0; cut < len(zipped); cut += 7 {
		k, err := peek(routing.ServeChat, "application/json", "gzip", nil, zipped, cut)
		require.NoError(t, err)
		require.Equal(t, "m-zip", k.Model)
		require.False(t, k.Continuable)
		require.Equal(t, len("lorem ipsum ")*9000, k.PromptBytes)
	}
	_, err := peek(routing.ServeChat, "application/json", "gzip", nil, zipped[:len(zipped)/2])
	require.Error(t, err)
	_, err = peek(routing.ServeChat, "application/json", "gzip", nil, plain)
	require.Error(t, err)
	k, err := peek(routing.ServeChat, "application/json", "zstd", nil, zipped)
	require.ErrorIs(t, err, errPeekEncoding)
	require.False(t, k.HasModel)

	// An abandoned reading leaves nothing behind: Close ends the coroutine.
	p := NewPeeker(routing.ServeChat, "application/json", "gzip", nil)
	_, _ = p.Write(zipped[:100])
	p.Close()
}

func TestPeekBombIsBounded(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	zero := make([]byte, 1<<20)
	for range 300 {
		_, _ = w.Write(zero)
	}
	require.NoError(t, w.Close())
	_, err := peek(routing.ServeChat, "application/json", "gzip", nil, z.Bytes())
	require.ErrorIs(t, err, errPeekBomb)
}

func TestPeekFields(t *testing.T) {
	k := peekChat(t, `{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":5,"max_completion_tokens":128.0,"n":2,
		"service_tier":"flex","user":"u","prompt_cache_key":"ck","previous_response_id":"resp_1","metadata":{"user_id":"mu","x":{"user_id":"no"}}}`)
	assert.Equal(t, Peek{Model: "m", HasModel: true, Stream: true, IncludeUsage: true, MaxTokens: 128, N: 2, ServiceTier: "flex", User: "u",
		CacheKey: "ck", Session: "ck", PreviousResponseID: "resp_1", ContinueBar: "n"}, k)

	k = peekChat(t, `{"metadata":{"user_id":"mu"},"max_tokens":null,"stream":1}`)
	assert.Equal(t, "mu", k.Session)
	assert.Equal(t, "mu", k.User)
	assert.Zero(t, k.MaxTokens)
	assert.Equal(t, 1, k.N)
	assert.True(t, k.Stream)

	k = peekChat(t, `{"model":"a","model":7,"stream":true,"stream":false,"max_tokens":9,"max_tokens":-1}`)
	assert.False(t, k.HasModel, "the last duplicate is no string")
	assert.False(t, k.Stream)
	assert.Zero(t, k.MaxTokens)
}

// What Python's json reads and Go's does not.
func TestPeekReadsWhatEnginesRead(t *testing.T) {
	k := peekChat(t, "\xef\xbb\xbf"+`{"temperature":NaN,"x":[Infinity,-Infinity],"max_tokens":NaN,"model":"m"}`)
	assert.Equal(t, "m", k.Model)
	assert.Zero(t, k.MaxTokens)
	_, err := peek(routing.ServeChat, "application/json", "", nil, []byte("\xef\xbb{}"))
	assert.NoError(t, err, "half a mark is forgiven")
}

func TestPeekPromptLength(t *testing.T) {
	for _, c := range []struct {
		svc                routing.Service
		body               string
		bytes, tokens, ids int
		media              int
	}{
		{routing.ServeChat, `{"messages":[{"role":"user","content":"12345678"}]}`, 8, 2, 0, 0},
		{routing.ServeChat, `{"messages":[{"content":[{"type":"text","text":"1234"},{"text":"5678","type":"text"}],"role":"user"}]}`, 8, 2, 0, 0},
		{routing.ServeChat, `{"messages":[{"role":"user","content":"\u4f60\ud83d\ude00\n\"\\x"}]}`, 3 + 4 + 4, 2, 0, 0},
		{routing.ServeChat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 1<<20) + `"}},{"type":"text","text":"what"}]}]}`, 4, 1001, 0, 1},
		{routing.ServeChat, `{"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}},{"type":"file","file":{"file_data":"AAAA","filename":"x.pdf"}}]}]}`, 0, 2000, 0, 2},
		{routing.ServeCompletions, `{"prompt":"12345678"}`, 8, 2, 0, 0},
		{routing.ServeCompletions, `{"prompt":["1234","5678"]}`, 8, 2, 0, 0},
		{routing.ServeCompletions, `{"prompt":[1,22,333,128000]}`, 0, 4, 4, 0},
		{routing.ServeCompletions, `{"prompt":[[1,2],[3]]}`, 0, 3, 3, 0},
		{routing.ServeResponses, `{"instructions":"1234","input":"5678"}`, 8, 2, 0, 0},
		{routing.ServeResponses, `{"input":[{"role":"user","content":[{"type":"input_text","text":"1234"},{"type":"input_image","image_url":"data:xxxxxxxxxxxxxxxxxxxxxxxxxxxx"}]}]}`, 4, 1001, 0, 1},
		{routing.ServeMessages, `{"messages":[{"role":"user","content":[{"type":"text","text":"1234"},{"type":"image","source":{"type":"base64","data":"AAAAAAAAAAAAAAAA"}}]}],"system":[{"type":"text","text":"5678","cache_control":{"type":"ephemeral"}}]}`, 8, 1002, 0, 1},
		{routing.ServeMessages, `{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"12"},{"type":"image","source":{"data":"AAAAAAAAAAAAAAAA"}}]}]}]}`, 3, 1000, 0, 1},
		{routing.ServeEmbeddings, `{"input":["1234","5678"]}`, 8, 2, 0, 0},
		{routing.ServeRerank, `{"query":"1234","documents":["5678","abcd"]}`, 12, 3, 0, 0},
		{routing.ServeChat, `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 100) + `"}],"messages":[{"role":"user","content":"1234"}]}`, 4, 1, 0, 0},
	} {
		for cut := 0; cut < len(c.body); cut += 1 + len(c.body)/200 {
			k, err := peek(c.svc, "application/json", "", NewPrefixSalt(nil), []byte(c.body), cut)
			require.NoError(t, err)
			if !assert.Equal(t, [4]int{c.bytes, c.tokens, c.ids, c.media}, [4]int{k.PromptBytes, k.PromptTokens, k.TokenIDs, k.Media}, "%.200s", c.body) {
				break
			}
		}
	}
}

func TestPeekContinuable(t *testing.T) {
	for body, bar := range map[string]string{
		`{"model":"m","messages":[{"role":"user","content":"a"}],"stream":true,"stream_options":{},"max_tokens":1,"temperature":0,"top_p":1,"top_k":1,"min_p":0,"stop":["x"],"user":"u","metadata":{},"service_tier":"auto","n":1}`: "",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"tools":null,"n":null}`:                                                                                                                               "",
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`:                                                                                                                                   "messages",
		`{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f"}}]}]}`:                                                                                                                      "messages",
		`{"messages":[{"role":"user","content":"a"}],"tools":[]}`:                                                                                                                                                                   "tools",
		`{"messages":[{"role":"user","content":"a"}],"seed":1}`:                                                                                                                                                                     "seed",
		`{"messages":[{"role":"user","content":"a"}],"n":2}`:                                                                                                                                                                        "n",
		`{"messages":[{"role":"user","content":"a"}],"logprobs":true}`:                                                                                                                                                              "logprobs",
		`{"messages":[{"role":"user","content":"a"}],"continue_final_message":true}`:                                                                                                                                                "continue_final_message",
		`{"messages":[{"role":"user","content":"a","name":"x"}]}`:                                                                                                                                                                   "messages",
		`{"prompt":"x"}`: "prompt",
	} {
		k := peekChat(t, body)
		assert.Equal(t, bar, k.ContinueBar, body)
		assert.Equal(t, bar == "", k.Continuable, body)
	}
	for body, bar := range map[string]string{
		`{"prompt":"x","max_tokens":1}`: "",
		`{"prompt":["x"]}`:              "prompt",
		`{"prompt":[1,2]}`:              "prompt",
		`{"max_tokens":1}`:              "prompt",
		`{"prompt":"x","echo":true}`:    "echo",
		`{"prompt":"x","messages":[]}`:  "messages",
	} {
		k, err := peek(routing.ServeCompletions, "application/json", "", nil, []byte(body))
		require.NoError(t, err)
		assert.Equal(t, bar, k.ContinueBar, body)
	}
	k := peekChat(t, `{"messages":[{"role":"user","content":"a"},{"content":"b","role":"assistant"}]}`)
	assert.Equal(t, "assistant", k.LastRole)
}

// The twin: encoding/json, with Python's reading of keys (exact case), on random documents cut anywhere.
func TestPeekTwin(t *testing.T) {
	rnd := rand.New(rand.NewPCG(4, 2))
	for i := range 4000 {
		body := randomRequest(rnd)
		cuts := []int{rnd.IntN(len(body) + 1)}
		if c := rnd.IntN(len(body) + 1); c >= cuts[0] {
			cuts = append(cuts, c)
		}
		k, err := peek(routing.ServeChat, "application/json", "", nil, body, cuts...)
		require.NoError(t, err, "%d: %s", i, body)
		compareTwin(t, body, k)
		if t.Failed() {
			t.Fatalf("document %d: %s", i, body)
		}
	}
}

// compareTwin holds the reading of a valid document against encoding/json's.
func compareTwin(t *testing.T, body []byte, k Peek) {
	var doc map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(body, &doc))
	var s string
	model := doc["model"]
	has := len(model) > 0 && model[0] == '"' && json.Unmarshal(model, &s) == nil
	if has && len(s) <= 512 {
		assert.Equal(t, s, k.Model)
		assert.True(t, k.HasModel)
	} else {
		assert.False(t, k.HasModel)
	}
	var b bool
	if json.Unmarshal(doc["stream"], &b) == nil {
		assert.Equal(t, b, k.Stream)
	}
	var n float64
	if json.Unmarshal(doc["max_tokens"], &n) == nil && n >= 0 && n < 1e9 && doc["max_completion_tokens"] == nil && doc["max_output_tokens"] == nil &&
		doc["n_predict"] == nil && doc["max_new_tokens"] == nil && doc["parameters"] == nil && doc["sampling_params"] == nil {
		assert.Equal(t, int(n), k.MaxTokens)
	}
	var text int
	var messages []struct{ Content json.RawMessage }
	if doc["prompt"] == nil && doc["input"] == nil && json.Unmarshal(doc["messages"], &messages) == nil && onlyKeys(doc, "model", "stream", "max_tokens", "messages", "stop", "x") {
		for _, m := range messages {
			if json.Unmarshal(m.Content, &s) != nil {
				return
			}
			text += len(s)
		}
		assert.Equal(t, text, k.PromptBytes)
	}
}

func onlyKeys(doc map[string]json.RawMessage, keys ...string) bool {
	n := 0
	for _, k := range keys {
		if _, ok := doc[k]; ok {
			n++
		}
	}
	return n == len(doc)
}

// randomRequest is a valid document with odd spacing, escapes, duplicates and nesting.
func randomRequest(rnd *rand.Rand) []byte {
	var b bytes.Buffer
	space := func() {
		for rnd.IntN(4) == 0 {
			b.WriteByte(" \n\t\r"[rnd.IntN(4)])
		}
	}
	str := func(s string) {
		b.WriteByte('"')
		for _, r := range s {
			switch {
			case r == '"' || r == '\\':
				b.WriteByte('\\')
				b.WriteRune(r)
			case r < 0x20 || rnd.IntN(8) == 0 && r < 0x10000 && !(r >= 0xD800 && r < 0xE000):
				fmt.Fprintf(&b, `\u%04x`, r)
			case rnd.IntN(8) == 0 && r >= 0x10000:
				r -= 0x10000
				fmt.Fprintf(&b, `\u%04X\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3ff)
			default:
				b.WriteRune(r)
			}
		}
		b.WriteByte('"')
	}
	word := func() string {
		const pieces = "ab{}[]:,\"\\ \n\t\u00e9模型🙂/model"
		r := []rune(pieces)
		w := make([]rune, rnd.IntN(12))
		for i := range w {
			w[i] = r[rnd.IntN(len(r))]
		}
		return string(w)
	}
	var value func(depth int)
	value = func(depth int) {
		space()
		switch k := rnd.IntN(8); {
		case k == 0 && depth < 5:
			b.WriteByte('{')
			for i := range rnd.IntN(4) {
				if i > 0 {
					b.WriteByte(',')
				}
				space()
				str([]string{"model", "content", word()}[rnd.IntN(3)])
				space()
				b.WriteByte(':')
				value(depth + 1)
			}
			space()
			b.WriteByte('}')
		case k == 1 && depth < 5:
			b.WriteByte('[')
			for i := range rnd.IntN(4) {
				if i > 0 {
					b.WriteByte(',')
				}
				value(depth + 1)
			}
			space()
			b.WriteByte(']')
		case k == 2:
			fmt.Fprint(&b, rnd.IntN(100000))
		case k == 3:
			b.WriteString([]string{"-1.5e3", "0.25", "true", "false", "null"}[rnd.IntN(5)])
		default:
			str(word())
		}
		space()
	}
	space()
	b.WriteByte('{')
	for i := range rnd.IntN(7) {
		if i > 0 {
			b.WriteByte(',')
		}
		space()
		key := []string{"model", "model", "Model", "stream", "max_tokens", "messages", "stop", "x", word()}[rnd.IntN(9)]
		str(key)
		space()
		b.WriteByte(':')
		switch {
		case key == "messages" && rnd.IntN(5) > 0:
			b.WriteByte('[')
			for j := range rnd.IntN(4) {
				if j > 0 {
					b.WriteByte(',')
				}
				b.WriteString(`{"role":"user","content":`)
				str(word())
				b.WriteByte('}')
			}
			b.WriteByte(']')
		case key == "stream" && rnd.IntN(3) > 0:
			b.WriteString([]string{"true", "false"}[rnd.IntN(2)])
		default:
			value(1)
		}
	}
	space()
	b.WriteByte('}')
	space()
	return b.Bytes()
}

func FuzzPeek(f *testing.F) {
	for _, p := range []string{"broken.json", "duplicate-model.json", "escaped-key.json", "model-last.json", "stream-string.json"} {
		b, err := os.ReadFile(filepath.Join("testdata/bodies", p))
		require.NoError(f, err)
		f.Add(b, 7)
	}
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}],"max_tokens":1e99}`), 3)
	salt := NewPrefixSalt([]byte("fuzz"))
	f.Fuzz(func(t *testing.T, body []byte, cut int) {
		cut = min(max(cut, 0), len(body))
		whole, err := peek(routing.ServeChat, "application/json", "", salt, body)
		parts, err2 := peek(routing.ServeChat, "application/json", "", salt, body, cut)
		require.Equal(t, whole, parts)
		require.Equal(t, err, err2)
		var doc map[string]json.RawMessage
		if json.Unmarshal(body, &doc) == nil && doc != nil && utf8.Valid(body) && !bytes.Contains(body, []byte(`\u`)) {
			require.NoError(t, err)
			var s string
			m := doc["model"]
			if len(m) > 0 && m[0] == '"' && json.Unmarshal(m, &s) == nil && len(s) <= 512 {
				require.Equal(t, s, whole.Model)
			} else {
				require.False(t, whole.HasModel)
			}
		}
	})
}

func FuzzForm(f *testing.F) {
	b, err := os.ReadFile("testdata/bodies/multipart-model-after-file.bin")
	require.NoError(f, err)
	f.Add(b, 100)
	f.Fuzz(func(t *testing.T, body []byte, cut int) {
		cut = min(max(cut, 0), len(body))
		const ct = "multipart/form-data; boundary=----demoBoundary7f3a"
		whole, err := peek(routing.ServeAudio, ct, "", nil, body)
		parts, err2 := peek(routing.ServeAudio, ct, "", nil, body, cut)
		require.Equal(t, whole, parts)
		require.Equal(t, err, err2)
	})
}
