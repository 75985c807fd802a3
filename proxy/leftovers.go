package proxy

import (
	"fmt"
	"time"
)

// Leftovers names every count that is not zero although nothing is under way: requests, claims, tickets that are still
// good, body memory. An agent at rest has none; a ticket that nobody used goes within two seconds. It is for tests and
// for finding out why a drain does not end.
func (p *Proxy) Leftovers() (list []string) {
	note := func(n int, what string) {
		if n != 0 {
			list = append(list, fmt.Sprintf("%s: %d", what, n))
		}
	}
	note(p.Inflight(), "requests in flight")
	l := p.account.load()
	note(l.Running, "running at the engine")
	note(l.Waiting, "waiting at the engine")
	note(l.PendingTokens, "prompt tokens pending at the engine")
	g := &p.gate
	g.mu.Lock()
	g.expected(time.Now()) // forgets tickets whose time is over
	note(g.queue.len(), "claims in the gate's queue")
	note(g.queue.tokens(), "prompt tokens held")
	note(g.count, "passes through the gate not given back")
	note(g.pending, "prompt tokens pending behind the gate")
	note(len(g.inside), "requests behind the gate without a first token")
	note(len(g.tickets), "tickets")
	g.mu.Unlock()
	note(int(p.bodies.used.Load()), "bytes of request bodies")
	p.lives.mu.Lock()
	for x := p.lives.first; x != nil; x = x.next {
		list = append(list, "a life that did not end")
	}
	p.lives.mu.Unlock()
	for _, peer := range p.cfg.Table.Snapshot().Peers() {
		note(peer.Inflight(), "in flight to "+peer.Member().Node)
		note(peer.InflightTokens(), "prompt tokens in flight to "+peer.Member().Node)
	}
	return list
}
