package sim

import "github.com/grapevine-lb/grapevine/routing"

// account is what an agent counts and learns of its own engine: package proxy's account in virtual time, with the same
// constants.
type account struct {
	running, waiting int
	pending          int // uncached prompt tokens without a first token
	accepted         uint32

	busySince, busy int64 // ns with prompts to do, since the last sample
	finished        int   // tokens in it
	rate            float64
	step            float64 // s, of decoding
}

const (
	prefillWindow = 512   // prompt tokens
	prefillBusy   = 200e6 // ns
	prefillLeast  = 20e6  // ns
	prefillMemory = 8192  // prompt tokens
	stepMemory    = 256   // decode steps
	defaultRate   = 2000  // prompt tokens/s
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
		a.busy += now - a.busySince
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
	a.finished += f.tokens
	if a.busy < prefillLeast || a.finished < prefillWindow && a.busy < prefillBusy {
		return
	}
	if a.finished > 0 {
		sample := float64(a.finished) / float64(a.busy) * 1e9
		share := float64(a.finished) / (float64(a.finished) + prefillMemory)
		if a.rate > 0 {
			sample = min(max(sample, a.rate/4), a.rate*4)
			a.rate += (sample - a.rate) * share
		} else {
			a.rate = sample
		}
	}
	a.busy, a.finished = 0, 0
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
func (a *account) speed() float64 {
	if a.rate > 0 {
		return a.rate
	}
	return defaultRate
}

// learned is the rate that it tells others.
func (a *account) learned() routing.Opt[float64] {
	if a.rate > 0 {
		return routing.Some(a.rate)
	}
	return routing.Opt[float64]{}
}
