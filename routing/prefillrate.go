package routing

import (
	"math"
	"time"
)

// Learning the prefill rate. A sample is taken over at least prefillWindow tokens or prefillBusy of work, so that the fixed
// cost of a short prompt is not read as a slow engine for long ones; the older value weighs more the less work it saw.
const (
	prefillWindow = 512                    // prompt tokens
	prefillBusy   = 200 * time.Millisecond // of an engine with prompts to do
	prefillLeast  = 20 * time.Millisecond  // prompts of one engine step end at once: the second alone would look infinitely fast
	// prefillMemory is after how many prompt tokens a sample has replaced 63 % of the old value; up to then all weigh alike, so
	// that a start with a few odd ones (a cold engine, a model whose tokens are not known yet) is soon forgotten. First tokens come at the end of
	// steps that also decode, so that equal engines look up to twice as fast as each other over a few prompts. (Eight replicas,
	// simulated, against exact state: agents-a 1.07 with 8,192 tokens, 1.00 with 16,384; an engine that becomes three times
	// slower is found out as well.)
	prefillMemory = 16384
	// What was measured longer ago than rateFresh is doubted more and more, twice as much every rateFresh.
	rateFresh = 10 * time.Second
)

// PrefillRate learns how many prompt tokens an engine computes in a second. Its user tells the time with prompts to do, and each
// prompt that is done; the zero value has measured nothing.
type PrefillRate struct {
	busy     time.Duration // since the last sample
	finished int           // tokens, likewise
	seen     float64       // tokens of all samples, at most prefillMemory
	rate     float64       // tokens/s; 0 = not known
}

// Busy adds time in which the engine had prompts to do.
func (p *PrefillRate) Busy(d time.Duration) { p.busy += d }

// Finish adds a prompt whose first token is there, and reports whether that gave a new value.
func (p *PrefillRate) Finish(tokens int) (measured bool) {
	p.finished += tokens
	if p.busy < prefillLeast || p.finished < prefillWindow && p.busy < prefillBusy {
		return false
	}
	if measured = p.finished > 0; measured {
		n := float64(p.finished)
		sample := n / p.busy.Seconds()
		if n < p.seen { // one odd sample (a cached prompt, a stall) must not decide
			sample = min(max(sample, p.rate/4), p.rate*4)
		}
		if p.seen > 0 {
			sample = p.rate + (sample-p.rate)*n/(n+p.seen)
		}
		p.rate, p.seen = sample, min(p.seen+n, prefillMemory)
	}
	p.busy, p.finished = 0, 0
	return measured
}

// Rate returns the learned rate, in prompt tokens/s.
func (p *PrefillRate) Rate() Opt[float64] {
	if p.rate == 0 {
		return Opt[float64]{}
	}
	return Some(p.rate)
}

// Doubted is the prefill rate that a replica should be credited with whose own was measured that long ago, in a fleet of that
// median. A replica that is taken for slow gets no requests, and without requests it could never show that it is as fast as the
// others. So what it was measured at rises, up to the fleet's median; the next prompts tell.
func Doubted(rate Opt[float64], age time.Duration, fleet float64) Opt[float64] {
	if !rate.OK || rate.V >= fleet || age <= rateFresh {
		return rate
	}
	return Some(min(fleet, rate.V*math.Exp2(float64(age)/float64(rateFresh)-1)))
}
