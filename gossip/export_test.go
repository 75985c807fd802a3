package gossip

import "github.com/hashicorp/serf/serf"

// SetTune lets a test change Serf's configuration last.
func (c *Config) SetTune(f func(*serf.Config)) { c.tune = f }

// Sender is sender.
func (n *Node) Sender(b []byte) (uint64, bool) { return n.sender(b) }

// Checked is how many members were tried because their records came from elsewhere.
func (n *Node) Checked() int {
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	return len(n.strangers.tried)
}
