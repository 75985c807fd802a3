package agent

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// A full queue shows in the record, and then further requests of the class are refused before their bodies are read; a higher
// class still gets in. When the queue is empty again, all do.
func TestSaturation(t *testing.T) {
	t.Parallel()
	c := fast()
	c.Params = enginesim.Rates(100_000, 20*time.Millisecond, 1)
	c.Dialect = "llamacpp" // it tells how many it runs at once
	cfg := loopbackConfig(startSim(t, c).url())
	cfg.QueueLimit, cfg.TrustPriority = 2, true
	r := start(t, cfg, Options{})
	r.untilReady()
	r.eventually(5*time.Second, "the engine's limit", func() bool { return r.Status().Engine.RunLimit.OK })
	assert.Zero(t, r.report(time.Now()).Flags&routing.FlagSaturated)
	ctx, hangUp := context.WithCancel(t.Context())
	post := func(ctx context.Context, body io.Reader, class string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.Addresses().Client+"/v1/chat/completions", body)
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Grapevine-Priority", class)
		return http.DefaultClient.Do(req)
	}
	for i := range 4 { // one runs, one is let in behind it after a while, two wait
		if i == 3 {
			r.eventually(5*time.Second, "one let in", func() bool {
				l := r.proxy.Load()
				rec, _ := r.table.Self().Report()
				return l.Running+l.Waiting == 2 && l.Held == 1 && rec.Flags&routing.FlagSaturated == 0
			})
		}
		go func() { // ends with the context
			if resp, err := post(ctx, strings.NewReader(strings.Replace(streamBody, "30", "3000", 1)), "default"); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		}()
	}
	r.eventually(5*time.Second, "a full queue", func() bool { return r.proxy.Load().Held == 2 })
	r.eventually(time.Second, "news of it", func() bool { rec, _ := r.table.Self().Report(); return rec.Flags&routing.FlagSaturated != 0 })
	rec, _ := r.table.Self().Report()
	assert.Equal(t, routing.ClassPriority, rec.LowestClass)

	// A body that never comes: the answer must.
	body, w := io.Pipe()
	defer w.Close()
	start := time.Now()
	resp, err := post(t.Context(), body, "default")
	require.NoError(t, err)
	assert.Equal(t, http.StatusTooManyRequests, resp.StatusCode)
	assert.NotEmpty(t, resp.Header.Get("Retry-After"))
	assert.Equal(t, "all_full", resp.Header.Get("X-Grapevine-Reason"))
	assert.Less(t, time.Since(start), 2*time.Second)
	_ = resp.Body.Close()

	// The highest class takes the place of one that waits, and waits for the engine.
	high, cancel := context.WithCancel(t.Context())
	defer cancel()
	before := r.proxy.Metrics().Gate
	go func() {
		if resp, err := post(high, strings.NewReader(streamBody), "priority"); err == nil {
			_ = resp.Body.Close()
		}
	}()
	r.eventually(5*time.Second, "a place for it", func() bool { g := r.proxy.Metrics().Gate; return g.Full == before.Full+1 && g.Held == before.Held+1 })
	cancel()
	hangUp()
	r.eventually(5*time.Second, "an empty queue", func() bool { rec, _ := r.table.Self().Report(); return rec.Flags&routing.FlagSaturated == 0 })
	resp, err = post(t.Context(), strings.NewReader(chatBody), "batch")
	require.NoError(t, err)
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	_ = resp.Body.Close()
}
