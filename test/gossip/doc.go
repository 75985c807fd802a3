// Package gossip has no code of its own: its tests put real agents, as processes, into networks that lose packets, block UDP, are
// cut in halves, have a small MTU, only IPv6 or address translation, and starve, stop and kill them. The networks are
// bridges with veth interfaces in network namespaces of the test's own, for which it needs root.
//
//	go test ./test/gossip -count=1          blocked UDP between three agents: seconds
//	go test ./test/gossip -count=1 -long    everything
//
// Delay and reordering are tested in memory (package gossip), since no kernel here has netem.
package gossip
