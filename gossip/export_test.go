package gossip

import "github.com/hashicorp/serf/serf"

// SetTune lets a test change Serf's configuration last.
func (c *Config) SetTune(f func(*serf.Config)) { c.tune = f }

// Sender is sender.
func (n *Node) Sender(b []byte) (uint64, bool) { return n.sender(b) }
