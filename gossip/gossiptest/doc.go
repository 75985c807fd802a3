// Package gossiptest is a network in memory for real Serf clusters in tests: delay, loss, partitions, blocked UDP, all
// from one seed. It uses only the time package, so a cluster runs inside testing/synctest in fake time:
//
//	synctest.Test(t, func(t *testing.T) {
//		net := gossiptest.New(1)
//		net.SetDelay(time.Millisecond, 5*time.Millisecond)
//		node, err := gossip.New(gossip.Config{Transport: net.Listen(), ...})
//		...
//	})
//
// A [Network] and its transports belong to the bubble that made them. Closing a node (gossip.Node.Close) is a crash: its
// address then refuses connections and swallows packets. Serf itself draws from the global random source, so runs with
// one seed are alike but not identical.
package gossiptest
