package proxy

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/guard"
)

// verdict is what an attempt at one replica came to, and with it what may be done next (design 6.7).
type verdict uint8

const (
	verdictDone      verdict = iota // the client has its answer, whatever the status
	verdictGone                     // the client hung up
	verdictNoConnect                // (a) dial error: surely not run, and the replica may be dead; free once
	verdictRefused                  // (a) a peer's agent refused it: no attempt, no charge
	verdictBusy                     // (a) 429, a busy 503 or a reply that means "not run"
	verdictCut                      // (b) the connection ended before any content reached the client; free once
	verdictError                    // (b) the engine broke off and says so, in a 200 stream before any content or as it dies; free once
	verdictFailed                   // (c) another 500, 502 or 504: passed on, unless the client made it idempotent
	verdictTimeout                  // (c) nothing came within the first-byte timeout
	verdictMoved                    // it was held there and goes on elsewhere: neither an attempt nor charged
	verdictBroken                   // content has gone out, or a head that no other answer can follow
	verdictResume                   // content has gone out, and the rest may come from another replica
	verdictParked                   // its stream goes on without a goroutine, see pump
)

// Reasons for which a request is sent again; labels of grapevine_retries_total.
const (
	retryDial       = "dial"
	retryRefused    = "refused"
	retryBusy       = "busy"
	retryCut        = "cut"
	retryError      = "error"
	retryIdempotent = "idempotent"
	retryReused     = "reused"
)

// retryReasons is the closed list.
var retryReasons = []string{retryDial, retryRefused, retryBusy, retryCut, retryError, retryIdempotent, retryReused}

const (
	maxRetries  = 2 // sent again at most so often
	maxRefusals = 8 // agents that may refuse one request before it ends; they count as no attempt
)

// retryState is what one request has used of its chances.
type retryState struct {
	retries  int
	refusals int
	freeDial bool // the free move after a dial error is used
	freeCut  bool // the single replay of a request that was cut short is used
}

// allow decides whether the request may be tried once more after v, and takes what that costs. idempotent means that
// the client said so; without a budget it costs nothing. It returns the reason for the counter.
func (s *retryState) allow(v verdict, idempotent bool, b *retryBudget, now time.Time) (string, bool) {
	if v == verdictRefused {
		s.refusals++
		return retryRefused, s.refusals <= maxRefusals
	}
	if s.retries >= maxRetries {
		return "", false
	}
	var reason string
	switch v {
	case verdictNoConnect:
		reason = retryDial
		if !s.freeDial {
			s.freeDial = true
			s.retries++
			return reason, true
		}
	case verdictCut, verdictError:
		if s.freeCut && !guard.Replay.Off() {
			return "", false // a replay happens once
		}
		s.freeCut = true
		s.retries++
		if v == verdictError {
			return retryError, true
		}
		return retryCut, true
	case verdictBusy:
		reason = retryBusy
	case verdictFailed, verdictTimeout:
		if !idempotent {
			return "", false
		}
		reason = retryIdempotent
	default:
		return "", false
	}
	if b != nil && !b.take(now) {
		return "", false
	}
	s.retries++
	return reason, true
}

// wait sleeps before the next try: full jitter over 25 ms × 2^n, at most 1 s. What surely did not run goes at once.
func (s *retryState) wait(ctx context.Context, v verdict, rnd *rand.Rand) error {
	switch v {
	case verdictNoConnect, verdictRefused, verdictBusy:
		return ctx.Err()
	}
	span := min(25*time.Millisecond<<max(s.retries-1, 0), time.Second)
	t := time.NewTimer(time.Duration(rnd.Int64N(int64(span))))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// retryBudget bounds an agent's repeats so that a failing fleet is not hit harder than a healthy one: a first attempt
// adds a share, a repeat costs 1, and a little comes with time.
type retryBudget struct {
	share, max, perSecond float64

	mu     sync.Mutex
	tokens float64
	at     time.Time
	spent  uint64 // refused for want of tokens
}

// newRetryBudget starts with 3 tokens; share is what one first attempt adds (default 0.1).
func newRetryBudget(share float64, now time.Time) *retryBudget {
	return &retryBudget{share: share, max: 10, perSecond: 0.1, tokens: 3, at: now}
}

func (b *retryBudget) refill(now time.Time) {
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(b.max, b.tokens+d.Seconds()*b.perSecond)
		b.at = now
	}
}

// first counts a first attempt.
func (b *retryBudget) first(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now)
	b.tokens = min(b.max, b.tokens+b.share)
}

// take pays for one repeat, or reports that the budget is used up.
func (b *retryBudget) take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now)
	if b.tokens < 1 {
		b.spent++
		return false
	}
	b.tokens--
	return true
}

// state returns what is left and how often it was refused.
func (b *retryBudget) state(now time.Time) (tokens float64, refused uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now)
	return b.tokens, b.spent
}
