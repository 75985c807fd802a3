package routing

import "time"

// RetryBudget bounds retries to a share of first attempts: + 0.1 token per first attempt, 1 per retry, cap 10, start
// 3, and at least one more every 10 s. The zero value is ready; the caller locks.
type RetryBudget struct {
	Share float64 // tokens per first attempt; 0 = 0.1

	begun  bool
	tokens float64
	at     time.Time
}

const (
	budgetShare = 0.1
	budgetCap   = 10
	budgetStart = 3
	budgetFloor = 0.1 // tokens/s
)

// Attempt counts a first attempt.
func (b *RetryBudget) Attempt(now time.Time) {
	b.refill(now)
	share := b.Share
	if share == 0 {
		share = budgetShare
	}
	b.tokens = min(budgetCap, b.tokens+share)
}

// Retry takes one token and reports whether there was one. A replay after the death of its replica is free: do not ask.
func (b *RetryBudget) Retry(now time.Time) bool {
	b.refill(now)
	if b.tokens < 1-1e-9 { // sums of 0.1 fall short by a rounding error
		return false
	}
	b.tokens = max(0, b.tokens-1)
	return true
}

// Tokens returns how many retries there are at now.
func (b *RetryBudget) Tokens(now time.Time) float64 {
	b.refill(now)
	return b.tokens
}

func (b *RetryBudget) refill(now time.Time) {
	if !b.begun {
		b.begun, b.tokens, b.at = true, budgetStart, now
		return
	}
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(budgetCap, b.tokens+d.Seconds()*budgetFloor)
		b.at = now
	}
}
