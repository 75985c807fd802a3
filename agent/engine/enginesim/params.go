package enginesim

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// StepCost is the time of one engine step, in seconds:
//
//	step = Fixed + max(Weights, Token*(prefill+decode)) + KV*context + Attention*pairs + Sequence*decode
//
// where prefill is the number of prompt tokens computed in the step, decode the number of sequences that get one token
// each, context the number of KV tokens that the decoding sequences read, and pairs the number of (token, earlier token)
// pairs that prefill attends to. Everything is kept in whole picoseconds, so skipping many equal steps at once is exact.
type StepCost struct {
	Fixed     float64 // scheduler and launch overhead, s
	Weights   float64 // reading the weights once, s: the floor of every step
	Token     float64 // compute, s per token
	KV        float64 // s per KV token read
	Attention float64 // s per pair
	Sequence  float64 // sampling and bookkeeping, s per decoding sequence
}

// Params describe a replica: the engine, its model and its card.
type Params struct {
	Name        string
	Cost        StepCost
	Budget      int     // tokens computed in one step at most, decodes and prefill together
	Slots       int     // sequences running at most
	KVTokens    int     // capacity of the KV cache, tokens
	BlockTokens int     // granularity of the prefix cache, tokens; 0 means 512
	NoCache     bool    // no prefix is reused
	Context     int     // longest prompt plus answer, tokens; 0 means as much as the KV cache holds
	MaxQueued   int     // running plus waiting at most, like vLLM's --max-num-queued-reqs; 0 means no limit
	Speed       float64 // 2 is twice as fast; 0 means 1
}

// Rates describes a replica by the three figures that an operator knows: prefill speed in tokens/s, duration of a decode
// step, and slots. A step takes max(decodeStep, tokens/prefillRate); the budget is about four decode steps' worth of
// prefill, so that a long prompt does not stall the streams beside it for longer.
func Rates(prefillRate float64, decodeStep time.Duration, slots int) Params {
	budget := max(slots+1, int(4*decodeStep.Seconds()*prefillRate), 256)
	return Params{
		Name:   "rates",
		Cost:   StepCost{Weights: decodeStep.Seconds(), Token: 1 / prefillRate},
		Budget: budget, Slots: slots, KVTokens: 4096 * slots, Speed: 1,
	}
}

// PrefillRate is the engine's speed at prompts, in tokens/s: a step full of them.
func (p Params) PrefillRate() float64 {
	speed := p.Speed
	if speed == 0 {
		speed = 1
	}
	return float64(p.Budget) * speed / (p.Cost.Fixed + max(p.Cost.Weights, p.Cost.Token*float64(p.Budget)))
}

// DefaultParams is a small replica for demos and tests: 10,000 prompt tokens/s, 20 ms a decode step, 32 slots, 131,072 KV tokens.
func DefaultParams() Params {
	p := Rates(10_000, 20*time.Millisecond, 32)
	p.Name = "small"
	return p
}

// Profile returns the parameters of a known card and model: "small" (DefaultParams), "h100-8b", "h100x4-70b", "a10-8b".
// The last three are derived from data sheets and public vLLM figures, not measured: trust their ratios.
func Profile(name string) (Params, error) {
	p := Params{Name: name, Budget: 8192, Slots: 256, Speed: 1}
	switch name {
	case "small":
		return DefaultParams(), nil
	case "h100-8b": // 8B in bf16 on one H100: 7.5 ms alone, 28 ms at 256 x 1k, 30k prompt tokens/s
		p.Cost = StepCost{Fixed: 1.5e-3, Weights: 6.0e-3, Token: 33e-6, KV: 52e-9, Attention: 1.3e-9, Sequence: 20e-6}
		p.KVTokens = 430_000
	case "h100x4-70b": // 70B in bf16 on four H100: 20 ms alone, 10k prompt tokens/s
		p.Cost = StepCost{Fixed: 3e-3, Weights: 16.5e-3, Token: 95e-6, KV: 33e-9, Attention: 1.6e-9, Sequence: 25e-6}
		p.KVTokens = 420_000
	case "a10-8b": // 8B in bf16 on a 24 GB card: little room for KV, preemption is common
		p.Cost = StepCost{Fixed: 2e-3, Weights: 30e-3, Token: 160e-6, KV: 290e-9, Attention: 6.5e-9, Sequence: 30e-6}
		p.KVTokens, p.Budget = 36_000, 2048
	default:
		return Params{}, fmt.Errorf("enginesim: unknown profile %q, known are small, h100-8b, h100x4-70b, a10-8b", name)
	}
	return p, nil
}

// Validate reports the first value that makes no engine.
func (p Params) Validate() error {
	switch {
	case p.Slots < 1:
		return errors.New("enginesim: slots must be at least 1")
	case p.Budget <= p.Slots:
		return fmt.Errorf("enginesim: the step budget (%d) must be larger than the slots (%d), or prompts would starve", p.Budget, p.Slots)
	case p.KVTokens < 1:
		return errors.New("enginesim: the KV cache needs at least 1 token")
	case p.BlockTokens < 0, p.Context < 0, p.MaxQueued < 0:
		return errors.New("enginesim: block tokens, context and queue limit must not be negative")
	case p.Speed < 0 || math.IsNaN(p.Speed) || math.IsInf(p.Speed, 0):
		return errors.New("enginesim: speed must be a positive number")
	case p.Cost.Fixed+p.Cost.Weights+p.Cost.Token <= 0:
		return errors.New("enginesim: a step must take time")
	}
	return nil
}

func (p Params) withDefaults() Params {
	if p.BlockTokens == 0 {
		p.BlockTokens = 512
	}
	if p.Speed == 0 {
		p.Speed = 1
	}
	if p.Context == 0 || p.Context > p.KVTokens {
		p.Context = p.KVTokens
	}
	return p
}

// picos is a time or a duration in picoseconds: 106 days fit.
type picos int64

func (t picos) ceil() time.Duration      { return time.Duration((t + 999) / 1000) }
func fromDuration(d time.Duration) picos { return picos(d) * 1000 }
func fromSeconds(s float64) picos        { return picos(math.Round(s * 1e12)) }

// costs is StepCost at a given speed in whole picoseconds.
type costs struct{ fixed, weights, token, kv, halfPair, sequence picos }

func (c StepCost) at(speed float64) costs {
	f := func(s float64) picos { return fromSeconds(s / speed) }
	k := costs{f(c.Fixed), f(c.Weights), f(c.Token), f(c.KV), f(c.Attention / 2), f(c.Sequence)}
	if k.fixed+k.weights+k.token == 0 { // a speed beyond all bounds must not stop the clock
		k.fixed = 1
	}
	return k
}

// step is the duration of one step. Pairs come doubled, to stay whole.
func (k costs) step(prefill, decode, context, doublePairs int) picos {
	compute := max(k.weights, k.token*picos(prefill+decode))
	return k.fixed + compute + k.kv*picos(context) + k.halfPair*picos(doublePairs) + k.sequence*picos(decode)
}
