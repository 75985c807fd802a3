package routing

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

func TestRetryBudget(t *testing.T) {
	retries := func(b *RetryBudget, now time.Time) (n int) {
		for b.Retry(now) {
			n++
		}
		return n
	}
	var b RetryBudget
	assert.Equal(t, 3, retries(&b, t0), "the start")
	for range 10 {
		b.Attempt(t0)
	}
	assert.Equal(t, 1, retries(&b, t0), "a tenth of first attempts")
	assert.Zero(t, retries(&b, t0.Add(9*time.Second)))
	assert.Equal(t, 1, retries(&b, t0.Add(10*time.Second)), "and one per ten seconds")
	for range 1000 {
		b.Attempt(t0.Add(10 * time.Second))
	}
	assert.Equal(t, 10, retries(&b, t0.Add(10*time.Second)), "the cap")
	assert.Equal(t, 10, retries(&b, t0.Add(time.Hour)))
	assert.InDelta(t, 0, b.Tokens(t0), 1e-6, "time that goes back gives nothing")

	half := RetryBudget{Share: 0.5}
	retries(&half, t0)
	half.Attempt(t0)
	half.Attempt(t0)
	assert.Equal(t, 1, retries(&half, t0))
}

// TestRetryBudgetInAnOutage: all answers fail for a while, every request would like two retries.
func TestRetryBudgetInAnOutage(t *testing.T) {
	var b RetryBudget
	retries := 0
	const first = 2000
	now := t0
	for range first {
		now = now.Add(20 * time.Millisecond)
		b.Attempt(now)
		for range 2 {
			if b.Retry(now) {
				retries++
			}
		}
	}
	assert.LessOrEqual(t, float64(retries), 0.1*first+3+now.Sub(t0).Seconds()/10)
	assert.Greater(t, retries, first/10)
}
