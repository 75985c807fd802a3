// Package routing says what a replica's report means, what it is worth now, and which replica a request should go to.
//
// It is pure: it opens nothing and starts nothing, and time and randomness come in as arguments. A [Table] holds what is
// known about every replica. Writers (gossip callbacks, the report loop) take its lock; readers load an immutable
// [Snapshot] and ask a [Policy] for a [Decision]. The counters of our own traffic live in each [Peer] behind a small
// lock of its own, so a pick never waits for a report.
//
//	table := routing.NewTable(self)
//	table.SetMember(member, now)
//	table.Update(report, now)
//	d := policy.Pick(table.Snapshot(), &routing.Request{Model: "m", PromptTokens: 900}, now, rnd)
//	if d.Peer != nil {
//		d.Peer.Sent(900, now)
//		// ... first content ...
//		d.Peer.FirstToken(900, now)
//		// ... end ...
//		d.Peer.Done(routing.OutcomeOK, 900, now)
//	}
package routing
