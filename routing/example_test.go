package routing_test

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// A table with ourselves and one peer, one pick, and the accounting of the request that follows.
func Example() {
	now := time.Now()
	table := routing.NewTable(routing.Member{Boot: 1, Node: "a"})
	table.SetMember(routing.Member{Boot: 2, Node: "b", Addr: "10.0.0.2:8081", Version: routing.AskVersion}, now)
	for boot := uint64(1); boot <= 2; boot++ {
		table.SetModels(boot, []routing.Model{{ID: "llama"}}, 0, now)
	}
	table.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, PendingTokens: routing.Some(9000), PrefillRate: routing.Some(10_000.0)}, now)
	table.Update(routing.Report{Boot: 2, Seq: 1, State: routing.StateReady, PendingTokens: routing.Some(100), PrefillRate: routing.Some(10_000.0)}, now)

	policy, err := routing.NewPolicy("auto")
	if err != nil {
		panic(err)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	request := routing.Request{Model: "llama", PromptTokens: 500}
	d := policy.Pick(table.Snapshot(), &request, now, rnd)
	fmt.Println("to ask:", d.Asks)

	// The peer link asks; the peer's agent answers with Table.Answer. Ours answers itself.
	var answers []routing.Answer
	for i, p := range d.Asked() {
		a := routing.Answer{Index: i, Score: 0.06, Tokens: 500, OK: true}
		if p.Self() {
			a = table.Answer(&request, now)
			a.Index = i
		}
		answers = append(answers, a)
	}
	d = routing.Settle(&d, answers)
	fmt.Printf("%s, because %v: %.3f s\n", d.Peer.Member().Node, d.Reason, d.Score)

	d.Peer.Sent(d.Tokens, now)
	d.Peer.FirstToken(d.Tokens, now)
	d.Peer.Done(routing.OutcomeOK, 0, now)
	fmt.Println("under way:", d.Peer.Inflight())
	// Output:
	// to ask: 2
	// b, because asked: 0.061 s
	// under way: 0
}
