package routing

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// PolicyOption changes a policy's default; each says which policies read it.
type PolicyOption func(*policyConfig)

type policyConfig struct {
	ask int
}

// WithAsk sets how many replicas "auto" asks above 16 members (default 3; 0 = none are asked).
func WithAsk(n int) PolicyOption { return func(c *policyConfig) { c.ask = n } }

// PolicyNames lists what NewPolicy knows, the default first.
var PolicyNames = []string{"auto", "p2c", "round_robin", "weighted_round_robin", "random", "least_requests",
	"least_tokens", "ewma", "consistent_hash", "local"}

// NewPolicy returns the policy of that name, or an error that lists the names.
func NewPolicy(name string, opts ...PolicyOption) (Policy, error) {
	c := policyConfig{ask: 3}
	for _, o := range opts {
		o(&c)
	}
	switch name {
	case "", "auto":
		return &auto{c}, nil
	}
	return nil, fmt.Errorf("unknown policy %q: one of %v", name, PolicyNames)
}

type auto struct{ c policyConfig }

func (*auto) Name() string { return "auto" }

func (*auto) Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision {
	return Decision{Peer: s.self, Reason: ReasonOnly}
}

// Settle chooses among the answers to d's ask list; without any it keeps what gossip said.
func Settle(d *Decision, answers []Answer) Decision {
	out := *d
	for _, a := range answers {
		if a.OK {
			out.Peer, out.Score, out.Reason = d.Ask[a.Index], a.Score, ReasonAsked
		}
	}
	return out
}
