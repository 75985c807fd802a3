package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
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

// C23, C24: exactly the limit passes, one byte more is 413 and says whose limit it is, known length or not.
func TestC24BodyLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, okAnswer)
		const limit = 100 << 10
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.MaxBody = limit }, e)
		frame := len(`{"model":"m","x":""}`)
		for _, size := range []int{limit - 1, limit, limit + 1} {
			for _, chunked := range []bool{false, true} {
				body := `{"model":"m","x":"` + strings.Repeat("a", size-frame) + `"}`
				var rd io.Reader = strings.NewReader(body)
				if chunked {
					rd = io.MultiReader(rd)
				}
				resp, err := f.hc.Post("http://"+f.clients[0]+chatPath, "application/json", rd)
				require.NoError(t, err)
				b, _ := io.ReadAll(resp.Body)
				if size <= limit {
					assert.Equal(t, 200, resp.StatusCode, "%d %v", size, chunked)
					assert.Equal(t, body, e.bodies[len(e.bodies)-1])
					continue
				}
				assert.Equal(t, 413, resp.StatusCode, "%d %v", size, chunked)
				var doc struct {
					Error struct{ Message, Type string }
				}
				require.NoError(t, json.Unmarshal(b, &doc))
				assert.Contains(t, doc.Error.Message, "GRAPEVINE_MAX_BODY")
				assert.Equal(t, "too_large", resp.Header.Get(headerReason))
			}
		}
		assert.Equal(t, 4, e.count())
		assert.EqualValues(t, 2, f.metrics(0).Refusals["too_large"])
		f.idle()
	})
}

// Bodies above what is kept go through whole, and cannot be sent again.
func TestBodyAboveTheKeptPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, second := answers(200, okAnswer), answers(200, okAnswer)
		f := newFleet(t, []uint64{1, 2}, func(_ int, c *Config) { c.KeepBody = 8 << 10 }, e, second)
		body := `{"model":"m","x":"` + strings.Repeat("a", 300<<10) + `"}`
		resp, _, err := f.get(body)
		require.NoError(t, err)
		assert.Equal(t, 200, resp.StatusCode)
		require.Equal(t, body, e.bodies[0])

		e.f = reply(503, "busy")
		resp, _, err = f.get(body)
		require.NoError(t, err)
		assert.Equal(t, 503, resp.StatusCode)
		assert.Zero(t, second.count())
		f.idle()
	})
	synctest.Test(t, func(t *testing.T) { // the model stands behind the kept part: it is read all the same (C25)
		e := answers(200, okAnswer)
		f := newFleet(t, []uint64{2}, func(_ int, c *Config) { c.KeepBody = 8 << 10 }, pair(1, e)...)
		body := `{"x":"` + strings.Repeat("a", 300<<10) + `","model":"m"}`
		resp, _, err := f.get(body)
		require.NoError(t, err)
		assert.Equal(t, 200, resp.StatusCode)
		assert.Equal(t, body, e.bodies[0])
		assert.Equal(t, "m", f.lastPick().Model)
	})
}

// Fifty large bodies at once whose model stands last, and memory for three: they wait for each other and none is refused.
// One that alone is larger than the memory passes too.
func TestLargeBodiesWaitForMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) {
			time.Sleep(50 * time.Millisecond)
			_, _ = io.WriteString(w, okAnswer)
		})
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.KeepBodies, c.NoGate = 700<<10, true }, e)
		var wg sync.WaitGroup
		for i := range 50 {
			size := 200 << 10
			if i == 20 {
				size = 1 << 20
			}
			wg.Go(func() {
				body := fmt.Sprintf(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}],"model":"m"}`,
					strings.Repeat("a", size))
				resp, text, err := f.get(body)
				if assert.NoError(t, err) {
					assert.Equal(t, 200, resp.StatusCode, text)
				}
			})
		}
		wg.Wait()
		assert.Equal(t, 50, e.count())
		f.idle()
	})
}

// Memory that does not come back in time is refused, and a client that hangs up meanwhile leaves nothing behind.
func TestLargeBodyWaitsNoLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		e := engine(func(_ int, w http.ResponseWriter, _ *http.Request) { <-hold; _, _ = io.WriteString(w, okAnswer) })
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.KeepBodies, c.NoGate = 50<<10, true }, e)
		body := `{"x":"` + strings.Repeat("a", 68<<10) + `","model":"m"}`
		var wg sync.WaitGroup
		wg.Go(func() { _, _, _ = f.get(body) })
		time.Sleep(time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() {
			resp, err := f.post(ctx, body)
			if err == nil {
				_ = resp.Body.Close()
			}
			assert.Error(t, err)
		})
		time.Sleep(time.Second)
		cancel()
		start := time.Now()
		resp, err := f.post(t.Context(), body)
		if err == nil { // a pipe, unlike TCP, cannot be closed on one side: the client may lose the answer while it writes on
			assert.Equal(t, 503, resp.StatusCode)
			assert.Equal(t, errBodyMemory.Reason, resp.Header.Get(headerReason))
			_ = resp.Body.Close()
		}
		assert.Positive(t, f.metrics(0).Refusals[errBodyMemory.Reason])
		assert.Equal(t, 30*time.Second, time.Since(start).Round(time.Second))
		close(hold)
		wg.Wait()
		f.idle()
	})
}

func TestInflightLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := engine(func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) { c.MaxInflight = 2 }, e)
		ctx, cancel := context.WithCancel(context.Background())
		for range 2 {
			go func() { _, _ = f.post(ctx, chatBody(false)) }()
		}
		synctest.Wait()
		resp, _, err := f.get(chatBody(false))
		require.NoError(t, err)
		assert.Equal(t, 429, resp.StatusCode)
		assert.NotEmpty(t, resp.Header.Get("Retry-After"))
		assert.NotEmpty(t, resp.Header.Get("Retry-After-Ms"))
		cancel()
		f.idle()
	})
}

// Nobody usable: 503 with a reason and a wait; an unknown model 404 or 503 as the pick says.
func TestNobody(t *testing.T) {
	for r, want := range map[routing.Reason]string{
		routing.ReasonUnknownModel: "404 unknown_model model_not_found",
		routing.ReasonNoModel:      "503 no_model model_unavailable",
		routing.ReasonNoService:    "404 no_service not_found",
		routing.ReasonTooLong:      "400 too_long context_length_exceeded",
		routing.ReasonAllFull:      "429 all_full overloaded",
		routing.ReasonNoneUsable:   "503 none_usable no_replica",
	} {
		synctest.Test(t, func(t *testing.T) {
			e := answers(200, okAnswer)
			f := newFleet(t, nil, func(_ int, c *Config) { c.Policy = nobodyBecause(r) }, e)
			resp, text, err := f.get(chatBody(true))
			require.NoError(t, err)
			var doc struct{ Error struct{ Code string } }
			require.NoError(t, json.Unmarshal([]byte(text), &doc))
			assert.Equal(t, want, fmt.Sprint(resp.StatusCode, " ", resp.Header.Get(headerReason), " ", doc.Error.Code))
			assert.Equal(t, resp.StatusCode == 503 || resp.StatusCode == 429, resp.Header.Get("Retry-After") != "")
			assert.Zero(t, e.count())
		})
	}
}

type nobodyBecause routing.Reason

func (nobodyBecause) Name() string { return "nobody" }

func (n nobodyBecause) Pick(*routing.Snapshot, *routing.Request, time.Time, *rand.Rand) routing.Decision {
	return routing.Decision{Reason: routing.Reason(n)}
}

// C107: exactly one outcome for each request, at the entry and at the target.
func TestC107OutcomesAddUp(t *testing.T) {
	hops(t, func(t *testing.T, order []uint64, target int) {
		steps := []func(int, http.ResponseWriter, *http.Request){
			reply(200, "{}"), reply(404, ""), reply(500, ""), reply(503, ""), reply(429, ""),
			func(_ int, w http.ResponseWriter, _ *http.Request) { eventHead(w); say(w, chunk("a")); die() },
			func(_ int, w http.ResponseWriter, _ *http.Request) {
				eventHead(w)
				say(w, chunk("a")+"data: {\"error\":{\"message\":\"x\"}}\n\n")
			},
			func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		}
		e := engine(func(n int, w http.ResponseWriter, r *http.Request) {
			if n > len(steps) {
				n = 2 // no JSON at all is the engine's to judge: a client error (C30)
			}
			steps[n-1](n, w, r)
		})
		f := newFleet(t, order, nil, pair(target, e)...)
		for range steps[:len(steps)-1] {
			_, _, _ = f.get(chatBody(true))
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := f.post(ctx, chatBody(true))
		require.Error(t, err)
		_, _, err = f.get(strings.Repeat("x", 1))
		require.NoError(t, err)
		synctest.Wait()
		sum := func(m map[string]uint64) (n uint64) {
			for _, v := range m {
				n += v
			}
			return n
		}
		m := f.metrics(0)
		assert.EqualValues(t, len(steps)+1, sum(m.EntryByOutcome), "%v", m.EntryByOutcome)
		for o, n := range map[string]int{outcomeOK: 1, outcomeClientError: 2, outcomeBusy: 2, outcomeCut: 1, outcomeStreamError: 1, outcomeCancel: 1} {
			assert.EqualValues(t, n, m.EntryByOutcome[o], "%s of %v", o, m.EntryByOutcome)
		}
		if target == 1 {
			assert.EqualValues(t, len(steps)+1, sum(f.metrics(1).TargetByOutcome))
			assert.Zero(t, sum(m.TargetByOutcome))
		}
		f.idle()
	})
}
