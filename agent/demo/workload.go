package demo

import (
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// arrival is one request of the workload.
type arrival struct {
	at     time.Duration // since the start
	entry  int           // replica whose agent gets it
	prompt int           // tokens
	output int           // tokens
	seed   uint64        // of the prompt's text, so that no two share a prefix
}

// Lengths are log-normal, as in real traces: most prompts are short, few are long, and the long ones make the others wait.
const (
	promptMedian, promptSpread, promptMin, promptMax = 250, 1.3, 16, 8000
	outputMedian, outputSpread, outputMin, outputMax = 24, 0.7, 4, 120
)

func lengths(rnd *rand.Rand) (prompt, output int) {
	draw := func(median, spread float64, lo, hi int) int {
		return min(max(int(median*math.Exp(spread*rnd.NormFloat64())), lo), hi)
	}
	return draw(promptMedian, promptSpread, promptMin, promptMax), draw(outputMedian, outputSpread, outputMin, outputMax)
}

// arrivals draws an open-loop Poisson process of rate requests/s over d, each to a random entry.
func arrivals(seed uint64, rate float64, d time.Duration, entries int) []arrival {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var out []arrival
	for at := 0.0; ; {
		at += rnd.ExpFloat64() / rate
		t := time.Duration(at * float64(time.Second))
		if t >= d {
			return out
		}
		a := arrival{at: t, entry: rnd.IntN(entries), seed: rnd.Uint64()}
		a.prompt, a.output = lengths(rnd)
		out = append(out, a)
	}
}

// capacity measures how many requests/s of this workload an engine finishes when it never runs out of work, in virtual time.
func capacity(p enginesim.Params, seed uint64) float64 {
	const jobs = 2000
	rnd := rand.New(rand.NewPCG(seed, 2))
	e := enginesim.New(p)
	for i := range jobs {
		prompt, output := lengths(rnd)
		if _, err := e.Submit(0, enginesim.Job{ID: uint64(i + 1), Prompt: prompt, Output: output}); err != nil {
			return 0
		}
	}
	done, last := 0, time.Duration(0)
	for done < jobs*9/10 { // the last ones run in a batch that empties
		at, ok := e.NextEvent()
		if !ok {
			break
		}
		for _, ev := range e.Advance(at) {
			if ev.Kind == enginesim.Done {
				done, last = done+1, ev.At
			}
		}
	}
	if last <= 0 {
		return 0
	}
	return float64(done) / last.Seconds()
}

// text makes a prompt of that many tokens (four bytes each) that shares no prefix with another.
func (a arrival) text() string {
	const letters = "abcdefghijklmnopqrstuvwxyz"
	rnd := rand.New(rand.NewPCG(a.seed, 3))
	var b strings.Builder
	b.Grow(4 * a.prompt)
	for range a.prompt {
		r := rnd.Uint32()
		b.WriteByte(letters[r%26])
		b.WriteByte(letters[(r>>8)%26])
		b.WriteByte(letters[(r>>16)%26])
		b.WriteByte(' ')
	}
	return b.String()
}
