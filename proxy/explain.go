package proxy

import (
	"cmp"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Explanation says where a request would go now and why. Nothing is sent or counted, and it holds no prompt.
type Explanation struct {
	Route        string  `json:"route"`
	Model        string  `json:"model"`
	PromptTokens int     `json:"prompt_tokens"` // estimated
	MaxTokens    int     `json:"max_tokens"`
	PrefixBlocks int     `json:"prefix_blocks"` // of 512 tokens, by which affinity is found
	Session      bool    `json:"session"`       // whether it names a session
	Class        uint8   `json:"class"`
	Policy       string  `json:"policy"`
	Decision     string  `json:"decision"` // node that it would go to; "" = none
	Reason       string  `json:"reason"`
	ScoreMS      float64 `json:"score_ms"`
	RunnerUp     string  `json:"runner_up"`
	RunnerUpMS   float64 `json:"runner_up_ms"`
	// Asked are the nodes that would be asked for their exact score before the last word.
	Asked      []string             `json:"asked"`
	Candidates []ExplainedCandidate `json:"candidates"` // cheapest first, excluded ones last
}

// ExplainedCandidate is one replica in an Explanation.
type ExplainedCandidate struct {
	Node         string               `json:"node"`
	Self         bool                 `json:"self"`
	State        string               `json:"state"`
	Excluded     string               `json:"excluded"` // why it may not be picked; "" = it may
	AgeMS        routing.Opt[float64] `json:"age_ms"`   // of its record; null for the own replica and before the first
	CachedTokens int                  `json:"cached_tokens"`
	Inflight     int                  `json:"inflight_from_here"`
	ScoreMS      float64              `json:"score_ms"`
	Terms        routing.Terms        `json:"terms"`
}

// Explain says where a request with that target (path and query), header and body would go if it entered here now.
func (p *Proxy) Explain(target string, header http.Header, body []byte, now time.Time) Explanation {
	x := &exchange{p: p, in: &RequestHead{Method: http.MethodPost, Target: target}}
	for k, vs := range header {
		for _, v := range vs {
			x.header.Add(k, v)
		}
	}
	x.path, _, _ = strings.Cut(target, "?")
	x.class = classify(http.MethodPost, x.path)
	k := NewPeeker(x.class.Service, cmp.Or(header.Get("Content-Type"), "application/json"), header.Get("Content-Encoding"), p.cfg.Salt)
	_, _ = k.Write(body)
	x.peek, _ = k.Done() // what cannot be read is not known, as for a real request
	k.Close()
	x.fillRequest()
	return p.explain(&x.req, x.class.Route, now)
}

// ExplainRequest says the same for a request of which only the numbers are known.
func (p *Proxy) ExplainRequest(r *routing.Request, now time.Time) Explanation {
	return p.explain(r, "", now)
}

func (p *Proxy) explain(r *routing.Request, route string, now time.Time) Explanation {
	s := p.cfg.Table.Snapshot()
	rnd := p.rnds.Get().(*rand.Rand)
	defer p.rnds.Put(rnd)
	d := p.cfg.Policy.Pick(s, r, now, rnd)
	e := Explanation{Route: route, Model: r.Model, PromptTokens: r.PromptTokens, MaxTokens: r.MaxTokens, PrefixBlocks: len(r.Prefix),
		Session: r.Session != 0, Class: r.Class, Policy: p.cfg.Policy.Name(), Reason: d.Reason.String(), Asked: []string{}}
	if r.Local {
		d = routing.Decision{Peer: s.Self(), Reason: routing.ReasonOnly}
		e.Reason = "the path must stay here"
	}
	if d.Peer != nil {
		e.Decision, e.ScoreMS = d.Peer.Member().Node, d.Score*1000
	}
	if d.RunnerUp != nil {
		e.RunnerUp, e.RunnerUpMS = d.RunnerUp.Member().Node, d.RunnerUpScore*1000
	}
	for _, q := range d.Asked() {
		e.Asked = append(e.Asked, q.Member().Node)
	}
	for _, c := range s.Explain(r, now) {
		out := ExplainedCandidate{Node: c.Peer.Member().Node, Self: c.Peer.Self(), State: c.Health.State.String(), Excluded: c.Excluded,
			CachedTokens: c.Cached, Inflight: c.Peer.Inflight(), ScoreMS: c.Score * 1000, Terms: c.Terms}
		if out.Self { // no peer judges it; what it says of itself holds
			r, _ := c.Peer.Report()
			out.State = r.State.String()
		} else if age := c.Peer.Age(now); age.OK {
			out.AgeMS = routing.Some(ms(age.V))
		}
		e.Candidates = append(e.Candidates, out)
	}
	slices.SortStableFunc(e.Candidates, func(a, b ExplainedCandidate) int {
		if x := cmp.Compare(boolInt(a.Excluded != ""), boolInt(b.Excluded != "")); x != 0 {
			return x
		}
		return cmp.Compare(a.ScoreMS, b.ScoreMS)
	})
	return e
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
