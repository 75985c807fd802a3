package sim

import (
	"context"
	"fmt"
	"math"
)

// Paper is what the usual sum on paper says about the number of replicas:
//
//	R·L/T requests/s times output tokens each, over the tokens/s that one saturated replica makes; some headroom, so that
//	queues stay short; one more, so that one may fail; and, with zones, enough for the others when one is lost
type Paper struct {
	Rate     float64 `json:"rate"`              // R, requests/s
	Output   float64 `json:"output_tokens"`     // L, mean
	Tokens   float64 `json:"tokens_per_second"` // T, of one saturated replica
	Bare     float64 `json:"bare"`              // R·L/T
	Headroom int     `json:"headroom"`          // at 70 % utilisation, rounded up
	NPlusOne int     `json:"n_plus_one"`
	Zones    int     `json:"zones,omitempty"` // … and one of Z zones lost: times Z/(Z−1); 0 = one zone
}

// utilisation is what the sum on paper leaves a replica at.
const utilisation = 0.7

// NewPaper does the sum. capacity is requests/s of one saturated replica (Capacity), zones 1 or more.
func NewPaper(rate, capacity, output float64, zones int) Paper {
	p := Paper{Rate: rate, Output: output, Tokens: capacity * output}
	p.Bare = rate * output / max(p.Tokens, 1e-9)
	p.Headroom = int(math.Ceil(p.Bare/utilisation - 1e-9))
	p.NPlusOne = p.Headroom + 1
	if zones > 1 {
		p.Zones = int(math.Ceil(p.Bare/utilisation*float64(zones)/float64(zones-1) - 1e-9))
	}
	return p
}

// Finding is the smallest fleet that keeps the SLO.
type Finding struct {
	Replicas int      `json:"replicas"` // 0 = none up to the bound did
	Share    float64  `json:"share"`    // that had to keep the SLO, 0..1
	Tried    []Result `json:"tried"`    // in the order of trying
	Paper    Paper    `json:"paper"`
}

// Find looks for the smallest number of replicas with which at least that share of the requests keeps the SLO, all
// faults of the configuration included; answers that are cut off with their entry agent, which no number of replicas
// saves, are left out. The rate stays; cfg.Rate must be set.
func Find(ctx context.Context, cfg Config, share float64) (Finding, error) {
	if !(cfg.Rate > 0) {
		return Finding{}, fmt.Errorf("sim: to find the number of replicas the rate must be given")
	}
	if !(share > 0 && share <= 1) {
		return Finding{}, fmt.Errorf("sim: share %g: must be above 0 and at most 1", share)
	}
	one := cfg
	one.Replicas = max(1, cfg.Zones)
	one, err := one.fill()
	if err != nil {
		return Finding{}, err
	}
	cfg.Capacity = one.Capacity
	_, output := cfg.Trace.Means()
	f := Finding{Share: share, Paper: NewPaper(cfg.Rate, cfg.Capacity, output, max(1, cfg.Zones))}
	if f.Paper.Bare > maxReplicas {
		return f, fmt.Errorf("sim: %g requests/s need more than %d replicas", cfg.Rate, maxReplicas)
	}
	least := max(1, cfg.Zones)
	keeps := func(n int) (bool, error) {
		c := cfg
		c.Replicas = n
		r, err := Run(ctx, c)
		if err != nil {
			return false, err
		}
		f.Tried = append(f.Tried, r)
		return r.Served >= share, nil
	}
	lo, hi := least-1, max(least, int(math.Ceil(f.Paper.Bare))) // lo does not keep it
	for {
		ok, err := keeps(hi)
		if err != nil {
			return f, err
		}
		if ok {
			break
		}
		lo = hi
		if hi >= maxReplicas {
			return f, nil
		}
		hi = min(maxReplicas, max(hi+1, hi+hi/4))
	}
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		ok, err := keeps(mid)
		if err != nil {
			return f, err
		}
		if ok {
			hi = mid
		} else {
			lo = mid
		}
	}
	f.Replicas = hi
	return f, nil
}
