// Package gossip spreads what every agent says about its replica.
//
// Serf carries the slow things: who is a member, identity in tags, failure detection, encryption, leaving. Load does
// not go into tags or user events, which are too slow and too heavy for it; it goes as a 60-byte record ([EncodeReport])
// in a private message on Serf's own memberlist, straight to the peers. Records are ordered by boot id and sequence
// number, so no clocks have to agree: a restart is a new boot id, an older sequence number is dropped.
//
// Up to 128 peers all get a record directly, at most 400 packets/s and 32 KiB/s an agent. Beyond that each agent sends to
// the 64 before it on a ring, so everybody hears 64 freshly, and the rest comes through a gossip queue in which a newer
// record of a member replaces the older one. The queue has packets of its own, 48 KiB/s of them: behind Serf's news of
// joins and leaves it would starve. Measured in memory: with 131 members the heard ones are 0.13 s old in the median (p99
// 0.24 s), the others 0.7 s (1.8 s); with 300 in the large profile 0.14 s (0.43 s) and 1.2 s (3.0 s).
//
// On paper, with a key, for 1,000 and 10,000 members. Direct records: 32 KiB/s at either size. The queue: 48 KiB/s, 760
// records/s at most; at 1,000 members each puts one in every 6 s, so that the others' are 4 s old in the median and 10 s at
// p99. From 3,300 on the least rate, one in 20 s, asks for more than the queue carries: at 10,000 a record goes out 1.5 times
// at each member instead of 4, reaches about half of them, and is some 30 s old. A state exchange is 200 bytes a member both
// ways, each 60 s (lan) to 180 s (large) at 1,000 and each 100 to 300 s at 10,000: 7 and 40 KB/s at most. A dead member is
// known after 7 s and after 10 s; its records stop at once. With what Serf and memberlist keep, a member costs 2.6 KiB of
// memory, 2.7 MB and 27 MB in all. Membership is what costs CPU: each join and leave reaches everybody some 16 times.
//
// Measured in memory and fake time (TestRig, one core): of 1,000 agents that start within 25 s all see all 8 to 9 s after
// the last; that took 0.20 s of CPU an agent. At work, loads changing once a second, an agent takes 0.55 % of a core; those
// that come by the queue are 3.3 s old in the median, 9.8 s at p99. A tenth rolled in 20 s is settled 11 s later, for 0.29
// s of CPU an agent; goodbyes reach 98 or 99 of 100 before memberlist's word, to the others a leave looks like a failure.
// The start grows with the power 2.4 of the members (300: 0.037 s an agent), so that 10,000 that start together would take 5 s
// of CPU each, 14 hours of one core and some 400 GB in a rig like that: it ends at 1,000 to 1,500. A cluster of 10,000 works,
// then, with 64 fresh candidates an agent and little idea of the others; clusters of at most 3,000 choose as well for less.
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
