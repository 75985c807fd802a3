// Package gossip spreads what every agent says about its replica.
//
// Serf carries the slow things: who is a member, identity in tags, failure detection, encryption, leaving. Load does
// not go into tags or user events, which are too slow and too heavy for it; it goes as a 60-byte record ([EncodeReport])
// in a private message on Serf's own memberlist, straight to the peers. Records are ordered by boot id and sequence
// number, so no clocks have to agree: a restart is a new boot id, an older sequence number is dropped.
//
// A [Node] is built by [New], which binds the sockets, and works in [Node.Run], which joins, joins again, publishes, and
// on the end of its context says goodbye, leaves and closes all. Nothing here holds readiness back: an agent that
// reaches nobody runs alone, warns and keeps trying.
//
// Concurrency: all methods may be called from any goroutine. [Config.OnReport] is called from memberlist's packet
// goroutine: it stores the report and returns at once. [Config.OnMember] is called from one goroutine of the node, in
// order, and may take its time; events that wait for it supersede each other by member, so none of the last states is
// lost. Neither may call back into [Node.Run] or [Node.Close].
package gossip
