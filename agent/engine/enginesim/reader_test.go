package enginesim_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// The product's reader finds out what we play, and reads from our pages what our model says.
func TestTheReaderIsTakenIn(t *testing.T) {
	for _, dialect := range []string{"vllm", "sglang", "llamacpp"} {
		t.Run(dialect, func(t *testing.T) {
			s, err := enginesim.NewServer(enginesim.ServerConfig{Dialect: dialect, Model: "tiny", Params: enginesim.Rates(10_000, 20*time.Millisecond, 2)})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			ready := make(chan net.Addr, 1)
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			wg.Go(func() { assert.NoError(t, s.Run(ctx)) })
			wg.Go(func() {
				assert.NoError(t, s.ListenAndServe(ctx, "tcp", "127.0.0.1:0", func(a net.Addr) { ready <- a }))
			})
			u := &url.URL{Scheme: "http", Host: (<-ready).String()}
			r := engine.New(engine.Config{URL: u})
			defer r.Close()
			kind, err := r.Detect(ctx)
			require.NoError(t, err)
			assert.Equal(t, dialect, string(kind))
			assert.Equal(t, engine.Healthy, r.Health(ctx).State)
			models, err := r.Models(ctx)
			require.NoError(t, err)
			require.Len(t, models, 1)
			assert.Equal(t, "tiny", models[0].ID)
			assert.Equal(t, 8192, models[0].ContextLength)
			require.NoError(t, r.WarmUp(ctx, "tiny"))
			n, err := r.CountTokens(ctx, "tiny", strings.Repeat("four", 9))
			require.NoError(t, err)
			assert.Equal(t, 9, n)

			streams, hangUp := context.WithCancel(ctx)
			for i := range 3 {
				wg.Go(func() {
					req, _ := http.NewRequestWithContext(streams, "POST", u.String()+"/v1/chat/completions",
						strings.NewReader(fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":"%d"}],"max_tokens":5000,"stream":true}`, i)))
					req.Header.Set("Content-Type", "application/json")
					if resp, err := http.DefaultClient.Do(req); err == nil {
						_, _ = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				})
			}
			require.Eventually(t, func() bool { return s.Stats().Running == 2 && s.Stats().Waiting == 1 }, 5*time.Second, 5*time.Millisecond)
			got, err := r.Read(ctx)
			require.NoError(t, err)
			assert.Equal(t, 2, got.Running.V)
			assert.Equal(t, 1, got.Waiting.V)
			assert.True(t, got.KVUsed.OK)
			assert.Greater(t, got.KVUsed.V, 0.0)
			assert.True(t, got.KVCapacity.OK)
			assert.GreaterOrEqual(t, got.KVCapacity.V, 8192)
			assert.True(t, got.GenerationTokens.OK)
			hangUp()
			require.Eventually(t, func() bool { return s.Stats().Running+s.Stats().Waiting == 0 }, 5*time.Second, 5*time.Millisecond)
		})
	}
}
