package proxy

import (
	"bytes"
	"context"
	"log/slog"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestAccessLog: off is silent at level info, a share is a share, and what failed is always there.
func TestAccessLog(t *testing.T) {
	count := func(share float64, outcome string) (n int) {
		x := &exchange{p: &Proxy{cfg: Config{AccessLog: share}}, rnd: rand.New(rand.NewPCG(1, 2)), outcome: outcome, ctx: context.Background(),
			log: slog.New(slog.NewTextHandler(new(bytes.Buffer), nil))}
		for range 10000 {
			if _, ok := x.logged(); ok {
				n++
			}
		}
		return n
	}
	assert.Zero(t, count(0, outcomeOK))
	assert.Zero(t, count(0, outcomeServerError))
	assert.Equal(t, 10000, count(1, outcomeOK))
	assert.InDelta(t, 1000, count(0.1, outcomeOK), 120)
	assert.InDelta(t, 1000, count(0.1, outcomeCancel), 120, "a client that hung up is no failure")
	assert.Equal(t, 10000, count(0.1, outcomeServerError))
}
