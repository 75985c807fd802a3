package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// An engine, or an agent with it, dies under load. No request fails that had received no content; streams with content
// end so that nobody takes them for whole; nothing stays counted.
func TestKillUnderLoad(t *testing.T) {
	full := roleChunk + strings.Repeat(chunk("t"), 5) + finishChunk + doneChunk
	for _, victim := range []string{"engine", "agent"} {
		t.Run(victim, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				serve := func() *scripted {
					return engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
						time.Sleep(100 * time.Millisecond)
						eventHead(w)
						time.Sleep(100 * time.Millisecond)
						say(w, roleChunk)
						for range 5 {
							say(w, chunk("t"))
							time.Sleep(50 * time.Millisecond)
						}
						say(w, finishChunk+doneChunk)
					})
				}
				f := newFleet(t, nil, func(_ int, c *Config) {
					c.Policy, _ = routing.NewPolicy("random")
					for b := uint64(1); b <= 3; b++ {
						c.Table.SetModels(b, []routing.Model{{ID: "m"}}, 0, time.Now())
						c.Table.Update(routing.Report{Boot: b, Seq: 1, State: routing.StateReady, Heartbeat: time.Minute}, time.Now())
					}
				}, serve(), serve(), serve())
				time.AfterFunc(1010*time.Millisecond, func() {
					if victim == "engine" {
						_ = f.engines[1].Close()
						return
					}
					_ = f.servers[len(f.engines)+2*1+1].Close() // its peer listener, with all connections
				})
				var mu sync.Mutex
				var whole, cut int
				var bad []string
				var wg sync.WaitGroup
				for i := range 400 {
					entry := f.clients[i%3]
					if victim == "agent" && i%3 == 1 {
						entry = f.clients[0]
					}
					wg.Go(func() {
						req, _ := http.NewRequestWithContext(context.Background(), "POST", "http://"+entry+chatPath, strings.NewReader(chatBody(true)))
						resp, err := f.hc.Do(req)
						if err != nil {
							mu.Lock()
							defer mu.Unlock()
							bad = append(bad, err.Error())
							return
						}
						b, err := io.ReadAll(resp.Body)
						_ = resp.Body.Close()
						mu.Lock()
						defer mu.Unlock()
						switch {
						case err == nil && resp.StatusCode == 200 && string(b) == full:
							whole++
						case err != nil && strings.Contains(string(b), chunk("t")) && !strings.Contains(string(b), "[DONE]"):
							cut++
						default:
							bad = append(bad, fmt.Sprintf("%d %q %v", resp.StatusCode, b, err))
						}
					})
					time.Sleep(5 * time.Millisecond)
				}
				wg.Wait()
				assert.Empty(t, bad)
				assert.Equal(t, 400, whole+cut)
				assert.NotZero(t, cut, "the test has teeth")
				assert.Less(t, cut, 40)
				m := f.metrics(0)
				require.NotZero(t, m.Retries[retryCut]+m.Retries[retryDial])
				assert.Zero(t, m.EntryByOutcome[outcomeDeadly])
				if victim == "engine" {
					f.idle()
				}
			})
		})
	}
}
