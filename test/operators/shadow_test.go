package operators

import (
	"context"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// arrival is one request of a trace.
type arrival struct {
	at     time.Duration
	agent  int
	tokens int
}

// hotTrace has Poisson arrivals, most of them at the first agent.
func hotTrace(length time.Duration, rates []float64, seed uint64) (out []arrival) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	for i, rate := range rates {
		for at := 0.0; ; {
			at += rnd.ExpFloat64() / rate
			d := time.Duration(at * float64(time.Second))
			if d > length {
				break
			}
			out = append(out, arrival{d, i, 500 + rnd.IntN(2000)})
		}
	}
	return out
}

// play sends a trace and returns the times to the first token and the errors.
func play(t *testing.T, f *fleet, list []arrival, seed int) (first []time.Duration, errs []error) {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	defer hc.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := time.Now()
	for i, a := range list {
		wg.Go(func() {
			time.Sleep(time.Until(start.Add(a.at)))
			d, err := chat(ctx, hc, f.client(a.agent), a.tokens, 8, seed+i)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
				return
			}
			first = append(first, d)
		})
	}
	wg.Wait()
	return first, errs
}

// TestShadow: in shadow mode nothing moves, and the gain that it predicts is within 30 % of what switching on then brings.
// The fleet is switched at one agent, under load, and back; no request fails.
func TestShadow(t *testing.T) {
	longOnly(t)
	f := startFleet(t, 3, 3, func(_ int, c *agent.Config) { c.Mode = agent.ModeShadow })
	list := hotTrace(20*time.Second, []float64{13, 2, 2}, 7)
	moved := func() (n uint64) {
		for _, a := range f.agents {
			n += a.Status().Picks.Forwarded
		}
		return n
	}
	mode := func(want string) {
		require.Eventually(t, func() bool {
			for _, a := range f.agents {
				if a.Mode() != want {
					return false
				}
			}
			return true
		}, 5*time.Second, 20*time.Millisecond, "not all agents are "+want)
	}
	mode(agent.ModeShadow)
	warm, errs := play(t, f, list[:60], 1<<20) // until the rates of the engines are measured
	require.Empty(t, errs)
	require.NotEmpty(t, warm)
	require.NoError(t, f.agents[0].SetMode(agent.ModeOn))
	mode(agent.ModeOn)
	require.NoError(t, f.agents[0].SetMode(agent.ModeShadow))
	mode(agent.ModeShadow)
	before := moved()

	shadow, errs := play(t, f, list, 2<<20)
	require.Empty(t, errs)
	assert.Equal(t, before, moved(), "nothing moves in shadow mode")
	var gain, weight float64
	var would uint64
	for _, a := range f.agents {
		s := a.Status().Shadow
		n := 0
		for _, x := range list {
			if f.agents[x.agent] == a {
				n++
			}
		}
		require.True(t, s.GainMS.OK)
		gain += s.GainMS.V * float64(n)
		weight += float64(n)
		would += s.Moved
	}
	gain /= weight

	require.NoError(t, f.agents[1].SetMode(agent.ModeOn))
	mode(agent.ModeOn)
	on, errs := play(t, f, list, 3<<20)
	require.Empty(t, errs)
	assert.Greater(t, moved(), before, "requests move when it is on")
	real := float64(mean(shadow)-mean(on)) / float64(time.Millisecond)
	t.Logf("mean time to first token: shadow %s, on %s; gain predicted %.0f ms, measured %.0f ms; would have moved %d of %d, moved %d",
		mean(shadow), mean(on), gain, real, would, len(list), moved()-before)
	assert.InEpsilon(t, real, gain, 0.3, "the predicted gain")

	// Back and forth under load.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(700 * time.Millisecond):
				assert.NoError(t, f.agents[i%3].SetMode([]string{agent.ModeShadow, agent.ModeOn}[i%2]))
			}
		}
	})
	_, errs = play(t, f, hotTrace(6*time.Second, []float64{10, 2, 2}, 9), 4<<20)
	close(stop)
	wg.Wait()
	assert.Empty(t, errs, "errors while the mode changes")
}
