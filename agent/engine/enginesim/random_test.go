package enginesim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// Random clients, hang-ups and faults: whatever happens, every stream that ends well is whole, no other looks as if it
// were, nothing is left at the engine (bubble looks), and every run in the journal has ended.
func TestRandomTraffic(t *testing.T) {
	want := map[string]string{}
	bubble(t, ServerConfig{Seed: 5}, func(h *harness) {
		for i := range 20 {
			q := fmt.Sprint("question ", i)
			want[q] = parse(t, h.post(chatPath, ask(q, 60, true)).body).text
		}
	})
	for seed := range uint64(25) {
		r := rand.New(rand.NewPCG(seed, 9))
		p := Rates(2_000, 10*time.Millisecond, 1+r.IntN(6))
		p.KVTokens, p.MaxQueued, p.BlockTokens = 200+r.IntN(1000), 4+r.IntN(20), 16
		cfg := ServerConfig{Seed: 5, Params: p, Dialect: []string{"vllm", "sglang", "llamacpp"}[seed%3], HangUpLag: time.Duration(r.IntN(2)) * 50 * time.Millisecond}
		bubble(t, cfg, func(h *harness) {
			var wg sync.WaitGroup
			for range 80 {
				start, patience := time.Duration(r.IntN(10_000))*time.Millisecond, time.Duration(1+r.IntN(4000))*time.Millisecond
				q, n := fmt.Sprint("question ", r.IntN(20)), 1+r.IntN(60)
				wg.Go(func() {
					time.Sleep(start)
					ctx, cancel := context.WithTimeout(h.t.Context(), patience)
					defer cancel()
					got := h.do(ctx, "POST", chatPath, ask(q, n, true))
					s := parse(t, got.body)
					switch {
					case got.status != 200:
						assert.Empty(t, s.text)
					case s.finish == "length":
						assert.Equal(t, want[q][:n*bytesPerToken], s.text)
						assert.True(t, s.done || got.err != nil)
					default:
						assert.True(t, got.err != nil || s.finish == "abort" || s.errorObject != nil, "an end that looks whole: %q", got.body)
						assert.Equal(t, want[q][:len(s.text)], s.text, "what came is right as far as it goes")
					}
				})
			}
			for range 8 {
				at := time.Duration(r.IntN(10_000)) * time.Millisecond
				f := Fault{Kind: faultKinds[r.IntN(len(faultKinds))], Factor: 3, After: 1 + r.IntN(20), Count: 1 + r.IntN(3), For: time.Duration(1+r.IntN(1000)) * time.Millisecond, Marker: "7"}
				wg.Go(func() {
					time.Sleep(at)
					assert.NoError(t, h.Inject(f))
					time.Sleep(2 * time.Second)
					h.Revive()
				})
			}
			wg.Wait()
			time.Sleep(time.Second)
			for _, e := range h.Journal() {
				assert.NotEqual(t, "running", e.Outcome)
				assert.NotZero(t, e.End)
			}
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}
