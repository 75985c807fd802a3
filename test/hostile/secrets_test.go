package hostile

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// Whoever is on the agents' host and network, without a right to anything, reads all that there is to read: every page of the
// status listener with its profiles and the flight recorder, and the log at its lowest level. No prompt, no answer, no key
// of a client, of the engine, of the fleet or of the operators is in it, also when the engine quotes the prompt in its errors.
func TestSecretsNowhere(t *testing.T) {
	const prompt, clientKey, engineKey, token = "SECRETprompt", "SECRETclientkey", "SECRETenginekey", "SECRETtoken"
	rawKey := []byte("SECRETgossipkey-of-thirty-two-by")
	sum := sha256.Sum256([]byte(clientKey))
	keys := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(keys, []byte("sha256:"+hex.EncodeToString(sum[:])+"\n"), 0o600))

	sim, err := enginesim.NewServer(enginesim.ServerConfig{Dialect: "vllm", Model: "m", Params: enginesim.Rates(100_000, time.Millisecond, 8)})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = sim.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	var mu sync.Mutex
	seen := map[string]bool{} // Authorization fields at the engine
	engine := serveEngine(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.Header.Get("Authorization")+r.Header.Get("X-Api-Key")] = true
		mu.Unlock()
		if how := r.Header.Get("X-Fail"); how != "" {
			b, _ := io.ReadAll(r.Body)
			switch how {
			case "400", "500":
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(map[string]int{"400": 400, "500": 500}[how])
				_, _ = fmt.Fprintf(w, `{"error":{"message":%q}}`, b)
			case "stream":
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = fmt.Fprintf(w, "data: {\"error\":{\"message\":%q}}\n\n", b)
			case "cut":
				w.Header().Set("Content-Length", "100000")
				_, _ = w.Write(b)
			case "panic":
				panic(http.ErrAbortHandler)
			}
			return
		}
		sim.ServeHTTP(w, r)
	}))
	tune := func(c *agent.Config) {
		c.EngineURL, c.GossipKey, c.APIKeysFile = engine, base64.StdEncoding.EncodeToString(rawKey), keys
		c.EngineAPIKey, c.StatusToken, c.AccessLog = engineKey, token, 1
	}
	a := startVictimWith(t, tune)
	b := startVictimWith(t, func(c *agent.Config) { tune(c); c.Join = []string{a.addr.Gossip} })
	require.Eventually(t, func() bool { return len(a.Status().Peers) == 2 && len(b.Status().Peers) == 2 }, 20*time.Second, 20*time.Millisecond)
	resp, err := http.Post("http://"+a.addr.Status+"/debug/flight/start", "", nil)
	require.NoError(t, err)
	_ = resp.Body.Close()
	require.Equal(t, 200, resp.StatusCode)

	ask := func(v *victim, key, fail, body string) int {
		req, err := http.NewRequest("POST", "http://"+v.addr.Client+"/v1/chat/completions?q="+prompt, strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Cookie", prompt)
		if fail != "" {
			req.Header.Set("X-Fail", fail)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	body := fmt.Sprintf(`{"model":"m","max_tokens":3,"user":"%[1]s","metadata":{"x":"%[1]s"},"messages":[{"role":"user","content":"%[1]s %[2]s"}]}`, prompt, strings.Repeat("again ", 500))
	stream := strings.Replace(body, `"max_tokens"`, `"stream":true,"max_tokens"`, 1)
	for _, v := range []*victim{a, b} {
		for range 5 {
			assert.Equal(t, 200, ask(v, clientKey, "", body))
			assert.Equal(t, 200, ask(v, clientKey, "", stream))
		}
		assert.Equal(t, 401, ask(v, clientKey+"-mistyped", "", body))
		assert.NotEqual(t, 200, ask(v, clientKey, "", body[:100])) // cut JSON
		for _, how := range []string{"400", "500", "stream", "cut", "panic"} {
			ask(v, clientKey, how, body)
			ask(v, clientKey, how, stream)
		}
		req, _ := http.NewRequest("POST", "http://"+v.addr.Status+"/drain", nil)
		req.Header.Set("Authorization", "Bearer "+token+"-mistyped")
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 403, resp.StatusCode)
	}

	read := 0
	for _, v := range []*victim{a, b} {
		texts := map[string]string{"log": v.log.String()}
		for _, p := range []string{"/", "/page/page.js", "/status", "/metrics", "/picks", "/keys", "/explain?model=m", "/livez", "/readyz?entry=1", "/engine/health", "/engine/metrics",
			"/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2", "/debug/pprof/heap?debug=1", "/debug/pprof/allocs?debug=1", "/debug/pprof/threadcreate?debug=1",
			"/debug/pprof/block?debug=1", "/debug/pprof/mutex?debug=1", "/debug/pprof/trace?seconds=0.2", "/debug/pprof/profile?seconds=1", "/debug/flight", "/debug/vars", "/config", "/env"} {
			texts[p] = v.get(t, p)
		}
		live, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		req, err := http.NewRequestWithContext(live, http.MethodGet, "http://"+v.addr.Status+"/events", nil)
		require.NoError(t, err)
		if resp, err := http.DefaultClient.Do(req); assert.NoError(t, err) {
			events, _ := io.ReadAll(resp.Body)
			assert.NotEmpty(t, events)
			texts["/events"] = string(events)
			_ = resp.Body.Close()
		}
		cancel()
		for where, text := range texts {
			read += len(text)
			for _, secret := range []string{prompt, clientKey, engineKey, token, string(rawKey), base64.StdEncoding.EncodeToString(rawKey), hex.EncodeToString(rawKey), hex.EncodeToString(sum[:]), "SECRET"} {
				if strings.Contains(text, secret) { // not by assert, which would print the text
					t.Errorf("%s holds %q", where, secret)
				}
			}
		}
	}
	t.Logf("%d bytes read, no secret in them", read)
	mu.Lock()
	defer mu.Unlock()
	for auth := range seen {
		assert.Contains(t, []string{"", "Bearer " + engineKey}, auth, "the engine sees no client's key")
	}
}
