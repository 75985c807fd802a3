package agent

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/proxy"
)

// /engine/health stands for the health page that the engine has, not for one of a fixed name.
func TestEngineHealthIsTheEnginesOwn(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			fmt.Fprint(w, "Ollama is running")
			return
		}
		http.NotFound(w, r)
	}))
	defer s.Close()
	cfg := loopbackConfig(s.URL)
	cfg.EngineKind = "ollama"
	a := start(t, cfg, Options{})
	code, body := a.get("/engine/health")
	assert.Equal(t, 200, code)
	assert.Equal(t, "Ollama is running", body)

	cfg = loopbackConfig(s.URL)
	cfg.NodeName = "found"
	found := start(t, cfg, Options{})
	found.eventually(5*time.Second, "health page", func() bool { code, _ = found.get("/engine/health"); return code == 200 })
}

// What an error answer means depends on the engine that gave it, which at an entry agent is a peer's as often as the own one.
func TestReplyClassByKind(t *testing.T) {
	for _, row := range []struct {
		kind   string
		status int
		body   string
		class  proxy.ReplyClass
	}{
		{"vllm", 500, "cannot schedule new futures after shutdown", proxy.ReplyNotRun},
		{"sglang", 500, "cannot schedule new futures after shutdown", proxy.ReplyOther},
		{"dynamo", 404, "Model not found", proxy.ReplyNotRun},
		{"vllm", 404, "Model not found", proxy.ReplyOther},
		{"llamacpp", 503, "Loading model", proxy.ReplyBusy},
		{"unheard of", 429, "", proxy.ReplyBusy},
		{"", 500, "", proxy.ReplyOther},
	} {
		assert.Equal(t, row.class, replyClass(row.kind, row.status, []byte(row.body)), "%s %d %s", row.kind, row.status, row.body)
	}
}
