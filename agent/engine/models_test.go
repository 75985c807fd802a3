package engine

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestModelsOfCapturedLists(t *testing.T) {
	for name, c := range map[string]struct {
		kind    Kind
		file    string
		id      string
		context int
	}{
		"vllm":     {VLLM, "vllm-0.32.0/get_v1_models.txt", "tiny", 2048},
		"vllm V0":  {VLLM, "vllm-0.8.5-v0/get_v1_models.txt", "tiny", 2048},
		"sim":      {VLLM, "llm-d-sim-eec055a/get_v1_models.txt", "tiny", 2048},
		"llamacpp": {LlamaCpp, "llamacpp-b11434/get_v1_models.txt", "gemma", 2048},
		"infinity": {Infinity, "infinity-0.0.78/get_v1_models.txt", "minilm", 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := captured(t, "pages/"+c.file)
			r := newFake(t, map[string]page{"/v1/models": p}).reader(t, c.kind)
			list, err := r.Models(t.Context())
			require.NoError(t, err)
			require.Len(t, list, 1)
			assert.Equal(t, c.id, list[0].ID)
			assert.Equal(t, c.context, list[0].ContextLength)
			assert.True(t, list[0].Loaded)
			var whole struct{ Data []json.RawMessage }
			require.NoError(t, json.Unmarshal(p.body, &whole))
			assert.Equal(t, string(whole.Data[0]), string(list[0].Raw), "the engine's own bytes")
		})
	}
}

func TestModelsWithAdapters(t *testing.T) {
	list, err := parseModels([]byte(`{"object":"list","data":[
		{"id":"base","max_model_len":4096,"parent":null,"root":"/m"},
		{"id":"sql","parent":"base","root":"/lora/sql","max_model_len":null},
		{"id":"demo/модель:7b","context_window":8192,"aliases":["demo/модель:7b","m"]},
		{"id":"odd","max_model_len":"4096","aliases":"none"},
		{"id":"r","status":{"value":"unloaded"}},
		{"object":"model"}, 7, null
	]}`))
	require.NoError(t, err)
	require.Len(t, list, 5)
	assert.Equal(t, []string{"base", "sql", "demo/модель:7b", "odd", "r"}, []string{list[0].ID, list[1].ID, list[2].ID, list[3].ID, list[4].ID})
	assert.Equal(t, "base", list[1].Parent)
	assert.Equal(t, 4096, list[1].ContextLength, "of its base model")
	assert.Equal(t, 8192, list[2].ContextLength)
	assert.Equal(t, []string{"m"}, list[2].Aliases)
	assert.Zero(t, list[3].ContextLength, "text is no number: unknown")
	assert.False(t, list[4].Loaded, "a router would load it")

	_, err = parseModels([]byte(`{"data":`))
	require.Error(t, err)
}

func TestModelsFromInfo(t *testing.T) {
	f := newFake(t, map[string]page{"/info": text(`{"model_id":"BAAI/bge","version":"1.8","max_input_length":512,"model_type":{}}`)})
	r := f.reader(t, TEI)
	list, err := r.Models(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	assert.Equal(t, "BAAI/bge", list[0].ID)
	assert.Equal(t, 512, list[0].ContextLength)
	assert.JSONEq(t, `{"id":"BAAI/bge","object":"model"}`, string(list[0].Raw))
	assert.Equal(t, "1.8", r.Version())

	f = newFake(t, map[string]page{"/v1/models": text(`{"data":[{"id":"tgi-model"}]}`), "/info": text(`{"model_id":"x","max_total_tokens":4096}`)})
	list, err = f.reader(t, TGI).Models(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	assert.Equal(t, "tgi-model", list[0].ID, "the list comes first")
	assert.Equal(t, 4096, list[0].ContextLength)
}

func TestModelsErrors(t *testing.T) {
	r := newFake(t, map[string]page{"/v1/models": status(503, "Loading model")}).reader(t, LlamaCpp)
	_, err := r.Models(t.Context())
	var se *StatusError
	require.ErrorAs(t, err, &se)
	assert.Equal(t, 503, se.Status)
	r = newFake(t, map[string]page{"/v1/models": text("<html>")}).reader(t, VLLM)
	_, err = r.Models(t.Context())
	require.Error(t, err)
}

const oneModel = `{"data":[{"id":"m"}]}`

func TestWarmUp(t *testing.T) {
	chat := text(`{"object":"chat.completion","choices":[{"message":{"content":"x"}}]}`)
	embedding := text(`{"object":"list","data":[{"embedding":[0.1]}]}`)
	for name, c := range map[string]struct {
		kind   Kind
		pages  map[string]page
		asked  []string
		serves routing.Service
		err    string
	}{
		"chat": {VLLM, map[string]page{"/v1/chat/completions": chat}, []string{"POST /v1/chat/completions"},
			routing.ServeAll &^ (routing.ServeEmbeddings | routing.ServeRerank), ""},
		"an engine of which less is known": {LlamaCpp, map[string]page{"/v1/chat/completions": chat}, []string{"POST /v1/chat/completions"}, 0, ""},
		"base model": {VLLM, map[string]page{"/v1/chat/completions": status(400, "no chat template"), "/v1/completions": text(`{"choices":[{"text":"x"}]}`)},
			[]string{"POST /v1/chat/completions", "POST /v1/completions"}, routing.ServeAll &^ (routing.ServeEmbeddings | routing.ServeRerank), ""},
		"embedding model": {VLLM, map[string]page{"/v1/embeddings": embedding},
			[]string{"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings"},
			routing.ServeEmbeddings | routing.ServeRerank | routing.ServeTokenize | routing.ServeOther, ""},
		"200 with an error inside": {VLLM, map[string]page{"/v1/chat/completions": text(`{"object":"error","message":"The model does not support chat","code":400}`),
			"/v1/completions": text(`{"error":{"message":"no"}}`), "/v1/embeddings": embedding},
			[]string{"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings"},
			routing.ServeEmbeddings | routing.ServeRerank | routing.ServeTokenize | routing.ServeOther, ""},
		"embedding engine": {Infinity, map[string]page{"/v1/embeddings": embedding}, []string{"POST /v1/embeddings"},
			routing.ServeEmbeddings | routing.ServeRerank | routing.ServeTokenize | routing.ServeOther, ""},
		"busy": {VLLM, map[string]page{"/v1/chat/completions": status(503, "busy"), "/v1/completions": chat},
			[]string{"POST /v1/chat/completions"}, 0, "warm-up: /v1/chat/completions answered 503: busy"},
		"without content": {VLLM, map[string]page{"/v1/chat/completions": text(`{"choices":[]}`)},
			[]string{"POST /v1/chat/completions"}, 0, `warm-up: /v1/chat/completions: an answer without content: {"choices":[]}`},
		"not JSON": {VLLM, map[string]page{"/v1/chat/completions": text(`hello`)},
			[]string{"POST /v1/chat/completions"}, 0, `warm-up: /v1/chat/completions: the answer is not JSON: hello`},
	} {
		t.Run(name, func(t *testing.T) {
			c.pages["/v1/models"] = text(oneModel)
			f := newFake(t, c.pages)
			r := f.reader(t, c.kind)
			err := r.WarmUp(t.Context(), "")
			if c.err == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.err)
			}
			var posts []string
			for _, call := range f.asked() {
				if call[:4] == "POST" {
					posts = append(posts, call)
				}
			}
			assert.Equal(t, c.asked, posts)
			if c.err == "" {
				assert.Equal(t, c.serves, r.Serves())
			}
		})
	}
}

func TestWarmUpRequestsAreTheSmallest(t *testing.T) {
	for kind, want := range map[routing.Service]string{
		routing.ServeChat:        `/v1/chat/completions {"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1}`,
		routing.ServeCompletions: `/v1/completions {"model":"m","prompt":"hi","max_tokens":1}`,
		routing.ServeEmbeddings:  `/v1/embeddings {"model":"m","input":"hi"}`,
	} {
		path, body := warmUpRequest(kind, "m")
		assert.Equal(t, want, path+" "+string(body))
	}
}

func TestWarmUpNeverLoadsAModel(t *testing.T) {
	f := newFake(t, map[string]page{
		"/v1/models":           text(`{"data":[{"id":"a","owned_by":"library"},{"id":"llama3.2:3b","owned_by":"library"}]}`),
		"/api/ps":              text(`{"models":[]}`),
		"/v1/chat/completions": text(`{"choices":[{}]}`),
	})
	r := f.reader(t, Ollama)
	require.ErrorIs(t, r.WarmUp(t.Context(), ""), ErrNotLoaded)
	require.ErrorIs(t, r.WarmUp(t.Context(), "a"), ErrNotLoaded)
	for _, call := range f.asked() {
		assert.NotContains(t, call, "POST")
	}
	f.set("/api/ps", captured(t, "pages/ollama-constructed/api-ps.json"))
	require.NoError(t, r.WarmUp(t.Context(), ""), "the one in memory")
	list, err := r.Models(t.Context())
	require.NoError(t, err)
	assert.Equal(t, []bool{false, true}, []bool{list[0].Loaded, list[1].Loaded})
	assert.Equal(t, 8192, list[1].ContextLength)

	router := newFake(t, map[string]page{"/v1/models": text(`{"data":[{"id":"a","status":{"value":"unloaded"}}]}`)})
	require.ErrorIs(t, router.reader(t, LlamaCpp).WarmUp(t.Context(), ""), ErrNotLoaded)
	err = router.reader(t, LlamaCpp).WarmUp(t.Context(), "b")
	assert.EqualError(t, err, `warm-up: the engine does not list model "b"`)
}

func TestCountTokens(t *testing.T) {
	for kind, body := range map[Kind]string{VLLM: `{"count":3,"max_model_len":9,"tokens":[1,2,3]}`, SGLang: `{"tokens":[1,2,3],"count":3}`, LlamaCpp: `{"tokens":[1,2,3]}`} {
		f := newFake(t, map[string]page{"/tokenize": text(body)})
		n, err := f.reader(t, kind).CountTokens(t.Context(), "m", "a b c")
		require.NoError(t, err)
		assert.Equal(t, 3, n)
		f.mu.Lock()
		var sent map[string]any
		require.NoError(t, json.Unmarshal([]byte(f.bodies[0]), &sent))
		f.mu.Unlock()
		assert.Equal(t, "a b c", sent[tableOf(kind).Abilities.Tokenize.Field])
	}
	_, err := newFake(t, nil).reader(t, Ollama).CountTokens(t.Context(), "m", "x")
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

func TestAPIKeyIsSent(t *testing.T) {
	var got []string
	f := newFake(t, nil)
	f.Config.Handler = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = append(got, r.Header.Get("Authorization")) })
	r := New(Config{URL: f.url(t), Kind: VLLM, APIKey: "k"})
	defer r.Close()
	_, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, []string{"Bearer k"}, got)
}

func TestAbilities(t *testing.T) {
	a := vllmTable.Abilities
	assert.True(t, a.IsNotRun(500, []byte(`{"error":{"message":"cannot schedule new futures after shutdown","code":500}}`)))
	assert.True(t, a.IsNotRun(503, []byte(`{"error":{"message":"The engine is currently busy"}}`)))
	assert.True(t, a.IsNotRun(429, nil))
	assert.False(t, a.IsNotRun(500, []byte(`{"error":{"message":"CUDA error"}}`)))
	assert.False(t, a.IsNotRun(400, nil))
	died := []byte(`{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}`)
	assert.True(t, a.IsDead(500, died))
	assert.False(t, a.IsNotRun(500, died), "it ran until then")
	assert.True(t, a.IsDead(200, died), "as the error event of a stream")
	assert.False(t, a.IsDead(503, []byte("busy")))

	for kind, want := range map[Kind]Priority{VLLM: LowFirst, SGLang: HighFirst, LlamaCpp: NoPriority, Dynamo: NoPriority} {
		assert.Equal(t, want, tableOf(kind).Abilities.Priority, kind)
	}
	assert.True(t, llamacppTable.Abilities.AbortByReset)
	assert.True(t, dynamoTable.Abilities.RejectsUnknownFields)
	assert.False(t, tgiTable.Abilities.ContinueChat, "white space is trimmed")
	for _, table := range tables {
		if fields := table.Abilities.ContinueFields; fields != "" {
			assert.True(t, json.Valid([]byte("{"+fields+"}")), table.Kind)
			assert.True(t, table.Abilities.ContinueChat, table.Kind)
		}
	}
}
