// Package gossip spreads what every agent says about its replica.
//
// Serf carries the slow things: who is a member, identity in tags, failure detection, encryption, leaving. Load does
// not go into tags or user events, which are too slow and too heavy for it; it goes as a 60-byte record ([EncodeReport])
// in a private message on Serf's own memberlist, straight to the peers. Records are ordered by boot id and sequence
// number, so no clocks have to agree: a restart is a new boot id, an older sequence number is dropped.
//
// Up to 128 peers all get a record directly, at most 400 packets/s and 32 KiB/s an agent. Beyond that each agent sends to
// the 64 before it on a ring, so everybody hears 64 freshly, and the rest comes through a gossip queue in which a newer
// record of a member replaces the older one. Measured with 131 members in memory: heard ones are 0.1 s old in the median
// (p99 0.25 s), the others 1.0 s (2.6 s); with 300 in the large profile 0.14 s (0.41 s) and 3.4 s (23 s).
//
// On paper, lan profile with a key, for 1,000 and 10,000 members: direct records 32 KB/s at either size; the queue at most
// 30 packets/s or 36 KB/s, which turns over once in 10 s and in 80 s; a state exchange of 200 bytes a member each 60 s
// and each 100 s, that is 7 and 40 KB/s; a dead member is known after 7 s and after 10 s (its records stop at once); the
// tables here take about 0.5 MB and 5 MB. A cluster of 10,000 works, then, with 64 fresh candidates an agent, but two
// clusters of 5,000 choose as well for less.
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
