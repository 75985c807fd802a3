package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// pair starts two agents that know each other's models, each in front of an engine of its own.
func pair(t *testing.T, first, second enginesim.ServerConfig, tune func(i int, c *Config)) (agents [2]*runner, engines [2]*simEngine) {
	t.Helper()
	for i, ec := range []enginesim.ServerConfig{first, second} {
		engines[i] = startSim(t, ec)
		cfg := loopbackConfig(engines[i].url())
		if i > 0 {
			cfg.Join = []string{agents[0].Addresses().Gossip}
		}
		if tune != nil {
			tune(i, &cfg)
		}
		agents[i] = start(t, cfg, Options{})
	}
	for _, a := range agents {
		a.untilReady()
		a.eventually(5*time.Second, "the other's models", func() bool {
			n := 0
			for _, p := range a.Status().Peers {
				if len(p.Models) > 0 && p.State == "ready" {
					n++
				}
			}
			return n == 2
		})
	}
	return agents, engines
}

func listedModels(t *testing.T, r *runner) (ids []string, byID map[string]map[string]any) {
	t.Helper()
	req := "http://" + r.Addresses().Client
	code, body := getURL(req + "/v1/models")
	require.Equal(t, 200, code, body)
	var list struct{ Data []map[string]any }
	require.NoError(t, json.Unmarshal([]byte(body), &list))
	byID = map[string]map[string]any{}
	for _, m := range list.Data {
		ids = append(ids, m["id"].(string))
		byID[m["id"].(string)] = m
	}
	return ids, byID
}

// An alias works at every agent, is in every list with the engine's fields, and the engine sees only its own name.
func TestModelAliases(t *testing.T) {
	t.Parallel()
	first, second := fast(), fast()
	second.Model = "llama-3.1-8b"
	agents, _ := pair(t, first, second, func(i int, c *Config) {
		if i == 1 {
			c.ModelAliases = []string{"small=llama-3.1-8b", "sim=llama-3.1-8b", "ghost=not-here"}
		}
	})
	for _, a := range agents {
		ids, byID := listedModels(t, a)
		assert.Equal(t, []string{"llama-3.1-8b", "sim", "small"}, ids)
		assert.Equal(t, byID["llama-3.1-8b"]["owned_by"], byID["small"]["owned_by"])
		assert.Equal(t, byID["llama-3.1-8b"]["max_model_len"], byID["small"]["max_model_len"])
		code, body := a.chat(strings.ReplaceAll(chatBody, `"sim"`, `"small"`))
		assert.Equal(t, 200, code, body)
		code, body = a.chat(strings.ReplaceAll(chatBody, `"sim"`, `"ghost"`))
		assert.Equal(t, 404, code, body)
	}
}

// A prompt that is too long for one replica goes to the other of the same model, whichever agent it enters at.
func TestContextLengthOfReplicas(t *testing.T) {
	t.Parallel()
	short, long := fast(), fast()
	short.Params.Context, long.Params.Context = 512, 8192
	agents, engines := pair(t, short, long, nil)
	for i := range 10 {
		body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":4}`, i, strings.Repeat("word ", 800))
		code, answer := agents[i%2].chat(body)
		require.Equal(t, 200, code, answer)
		body = fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d short"}],"max_tokens":600,"ignore_eos":false}`, i)
		code, answer = agents[i%2].chat(body) // could grow beyond
		require.Equal(t, 200, code, answer)
	}
	assert.EqualValues(t, 0, engines[0].server.Stats().Rejected)
	learned := agents[0].Status().Engine.Learned
	if assert.Len(t, learned, 1, "by the entry too, of answers from elsewhere") {
		assert.EqualValues(t, 10, learned[0].Answers)
		assert.InDelta(t, 4, learned[0].BytesPerToken.V, 0.5)
	}
}

// Lists differ only if something in them does: the time of an answer is nothing.
func TestModelsDigest(t *testing.T) {
	list := func(raw string) []engine.Model { return []engine.Model{{ID: "m", Raw: json.RawMessage(raw)}} }
	a := modelsDigest(list(`{"id":"m","created":1,"permission":[{"id":"modelperm-1"}],"max_model_len":9}`), 0)
	assert.Equal(t, a, modelsDigest(list(`{"id":"m","created":2,"permission":[{"id":"modelperm-2"}],"max_model_len":9}`), 0))
	assert.NotEqual(t, a, modelsDigest(list(`{"id":"m","created":1,"max_model_len":10}`), 0))
	assert.NotEqual(t, a, modelsDigest(list(`{"id":"m","created":1,"permission":[],"max_model_len":9}`), routing.ServeChat))
}

// What the engine serves reaches the other agents by name; what a later version serves beyond is left out.
func TestServesNames(t *testing.T) {
	t.Parallel()
	all := routing.ServeAll
	assert.Equal(t, all, servesFrom(servesNames(all)))
	assert.Equal(t, routing.ServeEmbeddings, servesFrom([]string{"embeddings", "video"}))
	assert.Empty(t, servesNames(0))
	generates := all &^ (routing.ServeEmbeddings | routing.ServeRerank)
	agents, _ := pair(t, fast(), fast(), nil)
	for _, a := range agents {
		for _, p := range a.table.Snapshot().Peers() {
			_, serves, ok := p.Models()
			assert.True(t, ok)
			assert.Equal(t, generates, serves, "a vLLM that chats does not embed")
		}
		assert.NotContains(t, a.Status().Engine.Serves, "embeddings")
		code, body := postURL("http://"+a.Addresses().Client+"/v1/embeddings", `{"model":"sim","input":"x"}`)
		assert.Equal(t, 404, code, body)
	}
}

func getURL(url string) (int, string) { return ask(http.MethodGet, url, "") }

func postURL(url, body string) (int, string) { return ask(http.MethodPost, url, body) }

func ask(method, url, body string) (int, string) {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	req.Header.Set("Content-Type", "application/json")
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	res, err := c.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error()
	}
	return res.StatusCode, string(b)
}
