package routing

import "time"

// The constants of the score. All sit on a plateau: halving or doubling one moves the mean time to first token by 1 to 4 %.
const (
	harmRunning  = 0.05 // share of our prefill charged per request that already decodes there …
	harmCap      = 32   // … up to this many: without the cap long prompts pile up on replicas with few requests
	harmWaiting  = 0.1  // the same per request that waits there
	kvSeconds    = 0.5  // s at full KV cache
	limitSeconds = 0.5  // s at the limit of running requests
	limitFrom    = 0.9  // share of the limit where that begins

	fullSeconds = 5 // s, on top where there is no KV space and no free GPU memory at all

	defaultRate      = 2000                 // prompt tokens/s, until anybody has measured
	defaultRoundTrip = time.Millisecond     // to a peer, until measured
	otherZone        = 5 * time.Millisecond // on top of the round trip
	defaultPrompt    = 512                  // tokens assumed for a waiting request whose tokens are unknown
)

// load is what a replica is believed to have now: its newest record and what we sent since.
type load struct {
	queue   float64 // uncached prompt tokens to compute before ours: engine and held
	running float64 // requests in the batch
	waiting float64 // requests without a place in it: engine's queue and held
	rate    float64 // prompt tokens/s, above 0
	kv      float64 // share of the KV cache in use
	kvCap   float64 // tokens; 0 = unknown
	limit   float64 // most requests at once; 0 = unknown
	step    float64 // s, of the batch; 0 = unknown
}

// Terms are the parts of a score, all in seconds but for the two factors.
type Terms struct {
	Queue     float64 `json:"queue_s"`      // pending prompt tokens / rate
	Prefill   float64 `json:"prefill_s"`    // our own uncached prompt tokens / rate
	Harm      float64 `json:"harm_s"`       // delay to those already there
	KV        float64 `json:"kv_s"`         // pressure on the KV cache
	Limit     float64 `json:"limit_s"`      // nearness of the limit of running requests
	RoundTrip float64 `json:"round_trip_s"` // to the replica; 0 for ourselves
	Penalty   float64 `json:"penalty_s"`    // what a recent failure counts as
	Slowness  float64 `json:"slowness"`     // 1, or how many times slower than predicted, against the median of peers
	SlowStart float64 `json:"slow_start"`   // 0.1 … 1
}

// Total returns the score in seconds.
//
//	((Queue + Prefill + Harm + KV + Limit) · Slowness) / SlowStart + RoundTrip + Penalty
func (t Terms) Total() float64 {
	return (t.Queue+t.Prefill+t.Harm+t.KV+t.Limit)*t.factor() + t.RoundTrip + t.Penalty
}

// factor returns what the load's seconds are multiplied by.
func (t Terms) factor() float64 { return t.Slowness / t.SlowStart }

// terms returns the parts of the score that follow from the load, for a request of u uncached prompt tokens.
//
//	Queue + Prefill = (Q + u)/R
//	Harm            = (u/R)·(0.05·min(running, 32) + 0.1·waiting)
//	KV              = 0.5·(share used + Q/capacity)           pending prompts will take their space
//	Limit           = 0.5·max(0, (running + waiting + 1 − 0.9·L)/(0.1·L))
func (l *load) terms(u float64) Terms {
	t := Terms{Queue: l.queue / l.rate, Prefill: u / l.rate, Slowness: 1, SlowStart: 1}
	t.Harm = t.Prefill * (harmRunning*min(l.running, harmCap) + harmWaiting*l.waiting)
	kv := l.kv
	if l.kvCap > 0 {
		kv += l.queue / l.kvCap
	}
	t.KV = kvSeconds * kv
	if n := l.running + l.waiting + 1; l.limit > 0 && n > limitFrom*l.limit {
		t.Limit = limitSeconds * (n - limitFrom*l.limit) / ((1 - limitFrom) * l.limit)
	}
	return t
}

// cost returns the sum of the terms, in seconds: what picks use. The twin of terms, in fewer steps. first is when the first
// token of the request is to come: after queue and prefill, at the end of a step of the batch. What it would cost others, and
// pressure that may come to nothing, are not in it.
func (l *load) cost(u float64) (cost, first float64) {
	perToken := 1 / l.rate
	prefill := u * perToken
	first = l.queue*perToken + prefill
	c := first + prefill*(harmRunning*min(l.running, harmCap)+harmWaiting*l.waiting) + kvSeconds*l.kv
	if l.running > 0 {
		first += l.step
	}
	if l.kvCap > 0 {
		c += kvSeconds * l.queue / l.kvCap
	}
	if n := l.running + l.waiting + 1; l.limit > 0 && n > limitFrom*l.limit {
		c += limitSeconds * (n - limitFrom*l.limit) / ((1 - limitFrom) * l.limit)
	}
	return c, first
}

// uncached returns how many of the request's prompt tokens must be computed where blocks leading blocks are cached.
func uncached(r *Request, blocks int) float64 { return float64(r.PromptTokens - r.Cached(blocks)) }

// Live is the exact state of our own replica, from the proxy's own accounting and the newest scrape.
type Live struct {
	Running, Waiting, Held    int
	PendingTokens, HeldTokens int // uncached prompt tokens without a first token
	PrefillRate               float64
	KVUsed                    float64 // 0..1
}
