package sim

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// account is what an agent counts and learns of its own engine: package proxy's account in virtual time, with the same
// constants.
type account struct {
	running, waiting int
	pending          int // uncached prompt tokens without a first token
	accepted         uint32

	busySince int64 // there were prompts to do since, as far as that was not told to prefill
	prefill   routing.PrefillRate
	rated     int64   // when that was last measured
	step      float64 // s, of decoding
}

const (
	stepMemory  = 256  // decode steps
	defaultRate = 2000 // prompt tokens/s
)

// flight is a request's part in an account.
type flight struct {
	tokens       int
	prompt, over bool
	firstAt      int64
}

func (a *account) start(tokens int, now int64) flight {
	if a.waiting == 0 {
		a.busySince = now
	}
	a.waiting++
	a.pending += tokens
	a.accepted++
	return flight{tokens: tokens, prompt: true}
}

func (a *account) leavePrompt(f *flight, now int64) {
	if a.waiting > 0 {
		a.prefill.Busy(time.Duration(now - a.busySince))
	}
	a.busySince = now
	f.prompt = false
	a.waiting--
	a.pending -= f.tokens
}

// first says that the request's first token is there, and learns from it.
func (a *account) first(f *flight, now int64) {
	if !f.prompt || f.over {
		return
	}
	a.leavePrompt(f, now)
	f.firstAt = now
	a.running++
	if a.prefill.Finish(f.tokens) {
		a.rated = now
	}
}

// done ends a request that has made that many tokens.
func (a *account) done(f *flight, tokens int, now int64) {
	if f.over {
		return
	}
	f.over = true
	if n := float64(tokens - 1); !f.prompt && n >= 2 {
		sample, share := float64(now-f.firstAt)/1e9/n, n/(n+stepMemory)
		if a.step == 0 {
			share = 1
		}
		a.step += (sample - a.step) * share
	}
	if f.prompt {
		a.leavePrompt(f, now)
	} else {
		a.running--
	}
}

// speed is the prefill rate that the agent itself believes in, tokens/s.
func (a *account) speed() float64 { return a.prefill.Rate().Or(defaultRate) }

// credited is the rate that it tells others and that picks go by, in a fleet of that median.
func (a *account) credited(fleet float64, now int64) routing.Opt[float64] {
	return routing.Doubted(a.prefill.Rate(), time.Duration(now-a.rated), fleet)
}
