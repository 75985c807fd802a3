package routing

import (
	"math"
	"math/rand/v2"
)

const (
	// silence is what a replica that did not answer in time is charged on top of what gossip says, in seconds.
	silence = 0.010
	// refusal is how much worse than the second best a replica must have become, in seconds, to refuse what it was chosen for:
	// the way back and another question.
	refusal = 0.005
	// loadChoices is how many of the asked are taken for their load alone. Everybody who asks at the same moment hears
	// the same answers, so the lowest of all would get all of them: simulated bursts (gamma, CV 4, 16 replicas asked)
	// end at 138 ms with all, at 108 ms with six. Who has more of the prompt cached is always considered.
	loadChoices = 6
)

// draw marks the replicas that may be chosen for their load alone.
func (d *Decision) draw(rnd *rand.Rand) {
	if rnd == nil || d.Asks <= loadChoices {
		d.drawn = 1<<d.Asks - 1
		return
	}
	for k := 0; k < loadChoices; {
		if bit := uint32(1) << intn(rnd, uint64(d.Asks)); d.drawn&bit == 0 {
			d.drawn |= bit
			k++
		}
	}
}

// Settle chooses between what the asked replicas answered and, for those that did not, what gossip said. Without any
// answer the first choice stands; if all refuse, Peer is nil and the reason is ReasonAllFull. It allocates nothing.
func Settle(d *Decision, answers []Answer) Decision {
	out := *d
	out.Asks = 0
	if len(answers) == 0 || d.Asks == 0 {
		return out
	}
	most := 0 // prompt tokens that the worst cached of them must compute
	var seen uint32
	for _, a := range answers {
		if a.Index >= 0 && a.Index < d.Asks {
			seen |= 1 << a.Index
			if a.OK {
				most = max(most, a.Tokens)
			}
		}
	}
	c := chosen{score: math.Inf(1), next: math.Inf(1)}
	for round := range 2 { // the second, over all, only if the first found none
		for _, a := range answers {
			if a.Index < 0 || a.Index >= d.Asks || !a.OK {
				continue
			}
			p := d.Ask[a.Index]
			if round > 0 || a.Tokens < most || p.self || d.drawn>>a.Index&1 != 0 {
				cost, wait := d.underWay(p, a.Tokens)
				c.take(p, (a.Score+cost)*d.askFactor[a.Index]+d.askExtra[a.Index], a.First+wait+p.roundTrip(), a.Tokens, ReasonAsked)
			}
		}
		if c.peer != nil {
			break
		}
	}
	inList := false
	for i, p := range d.Asked() {
		inList = inList || p == d.Peer
		if seen>>i&1 == 0 {
			c.take(p, d.AskScore[i]+silence, d.askFirst[i], d.AskTokens[i], ReasonBest)
		}
	}
	if d.Peer != nil && !inList {
		c.take(d.Peer, d.Score, d.First, d.Tokens, d.Reason)
	}
	if c.peer == nil {
		return Decision{Reason: ReasonAllFull}
	}
	out = Decision{Peer: c.peer, Score: c.score, First: c.first, Tokens: c.tokens, Reason: c.reason, RunnerUp: c.second}
	if c.second != nil {
		out.RunnerUpScore = c.next
	}
	return out
}

// Limit returns what the request may cost at the chosen replica, in seconds, when it gets there: beyond that, the second
// best is surely the better one, another asker was faster, and the replica may refuse, once. 0 = it was not asked, or
// there is no second best.
func (d *Decision) Limit() float64 {
	if d.Reason != ReasonAsked || d.RunnerUp == nil || d.Peer.self {
		return 0
	}
	return d.RunnerUpScore + refusal
}

// chosen is the best and the second best so far.
type chosen struct {
	peer, second *Peer
	score, next  float64
	first        float64
	tokens       int
	reason       Reason
}

func (c *chosen) take(p *Peer, score, first float64, tokens int, why Reason) {
	switch {
	case score < c.score:
		c.second, c.next = c.peer, c.score
		c.peer, c.score, c.first, c.tokens, c.reason = p, score, first, tokens, why
	case score < c.next:
		c.second, c.next = p, score
	}
}

// underWay returns what our own sends that p's answer cannot contain yet cost a request of u uncached prompt tokens,
// in seconds: those of the last one and a half round trips before the pick, and all since; wait is for how long they are
// before it.
func (d *Decision) underWay(p *Peer, u int) (cost, wait float64) {
	if p.self {
		return 0, 0
	}
	p.mu.Lock()
	n, tokens := p.sends.after(d.at - tick(1.5e9*p.roundTrip()))
	p.mu.Unlock()
	if n == 0 {
		return 0, 0
	}
	l := load{queue: float64(tokens), waiting: float64(n)}
	if v := p.view.Load(); v != nil {
		l.rate = v.base.rate
	}
	if l.rate <= 0 {
		l.rate = d.table.Rate()
	}
	t := l.terms(float64(u))
	return t.Queue + t.Harm, t.Queue
}
