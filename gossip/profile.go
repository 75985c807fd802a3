package gossip

import (
	"fmt"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/serf/serf"
)

// Profile is a set of values for Serf, memberlist and our own sending.
type Profile struct {
	Name string

	// Load records.
	MinGap     time.Duration // shortest time between two records that no flag change forces
	Heartbeat  time.Duration // longest time between two records
	WatchSet   int           // peers that get records directly when there are more than DirectMax
	DirectMax  int           // up to so many peers all get records directly
	Bytes      int           // bytes/s of records sent directly
	Background int           // bytes/s of packets from the background queue, relayed records included

	GossipInterval time.Duration // of Serf
	GossipNodes    int

	serf func(*serf.Config)
}

// The profiles. Values and their reasons: 500/200 ms probes find a dead node in 3 to 5 s and survive stalls of 2 s;
// Serf's defaults need 6 to 7 s, twice as fast ones declare stalled nodes dead.
var profiles = map[string]Profile{
	"lan": {
		Name: "lan", MinGap: 100 * time.Millisecond, Heartbeat: time.Second, WatchSet: 64, DirectMax: 128, Bytes: 32 << 10, Background: 48 << 10,
		GossipInterval: 100 * time.Millisecond, GossipNodes: 3,
		serf: func(c *serf.Config) {
			m := c.MemberlistConfig
			m.ProbeInterval, m.ProbeTimeout = 500*time.Millisecond, 200*time.Millisecond
			m.SuspicionMult = 4
			m.PushPullInterval = 10 * time.Second
			m.GossipToTheDeadTime = 60 * time.Second
			m.TCPTimeout = 3 * time.Second
			m.HandoffQueueDepth = 4096
			c.ReconnectInterval, c.ReconnectTimeout, c.TombstoneTimeout = 5*time.Second, 10*time.Minute, 10*time.Minute
			c.MinQueueDepth, c.QueueDepthWarning = 1024, 256
			c.BroadcastTimeout, c.LeavePropagateDelay = 3*time.Second, time.Second
			c.DisableCoordinates = true
		},
	},
	"large": {
		Name: "large", MinGap: 250 * time.Millisecond, Heartbeat: time.Second, WatchSet: 64, DirectMax: 128, Bytes: 32 << 10, Background: 48 << 10,
		GossipInterval: 200 * time.Millisecond, GossipNodes: 4,
		serf: func(c *serf.Config) {
			m := c.MemberlistConfig
			m.ProbeInterval, m.ProbeTimeout = time.Second, 500*time.Millisecond
			m.SuspicionMult = 5
			m.PushPullInterval = 30 * time.Second
			m.GossipToTheDeadTime = 60 * time.Second
			m.TCPTimeout = 5 * time.Second
			m.HandoffQueueDepth = 8192
			c.ReconnectInterval, c.ReconnectTimeout, c.TombstoneTimeout = 15*time.Second, 10*time.Minute, 10*time.Minute
			c.MinQueueDepth, c.QueueDepthWarning = 4096, 1024
			c.BroadcastTimeout, c.LeavePropagateDelay = 10*time.Second, 2*time.Second
			c.DisableCoordinates = true
		},
	},
	"wan": {
		Name: "wan", MinGap: time.Second, Heartbeat: 5 * time.Second, WatchSet: 64, DirectMax: 128, Bytes: 16 << 10, Background: 16 << 10,
		GossipInterval: 500 * time.Millisecond, GossipNodes: 4,
		serf: func(c *serf.Config) {
			m := c.MemberlistConfig
			m.ProbeInterval, m.ProbeTimeout = 5*time.Second, 3*time.Second
			m.SuspicionMult = 6
			m.PushPullInterval = 60 * time.Second
			m.GossipToTheDeadTime = 120 * time.Second
			m.TCPTimeout = 30 * time.Second
			m.HandoffQueueDepth = 1024
			c.ReconnectInterval, c.ReconnectTimeout, c.TombstoneTimeout = 30*time.Second, time.Hour, time.Hour
			c.MinQueueDepth, c.QueueDepthWarning = 1024, 256
			c.BroadcastTimeout, c.LeavePropagateDelay = 10*time.Second, 3*time.Second
			c.DisableCoordinates = false
		},
	},
}

// ProfileNamed returns a profile by its name; "" and "auto" mean lan, whose sending adapts to the member count by itself.
func ProfileNamed(name string) (Profile, error) {
	if name == "" || name == "auto" {
		name = "lan"
	}
	p, ok := profiles[name]
	if !ok {
		return Profile{}, fmt.Errorf("gossip profile %q: want auto, lan, large or wan", name)
	}
	return p, nil
}

// config returns Serf's configuration with everything that does not depend on the node.
func (p *Profile) config() *serf.Config {
	c := serf.DefaultConfig()
	m := memberlist.DefaultLANConfig()
	c.MemberlistConfig = m
	m.GossipInterval, m.GossipNodes = p.GossipInterval, p.GossipNodes
	m.RetransmitMult = 4
	m.SuspicionMaxTimeoutMult = 6
	m.IndirectChecks = 3
	m.AwarenessMaxMultiplier = 8
	m.UDPBufferSize = 1200                   // with IPv6, label and encryption below 1280 bytes, which any network passes
	m.EnableCompression = false              // 3.8 times the CPU, and records do not shrink
	m.DeadNodeReclaimTime = time.Millisecond // a second line only: names are unique
	m.QueueCheckInterval = 5 * time.Second   // between checks queues grow without bound
	c.QueueCheckInterval = 5 * time.Second
	c.ReapInterval = 15 * time.Second
	c.RecentIntentTimeout = 5 * time.Minute
	c.EventBuffer, c.QueryBuffer = 64, 64 // we send no user events; rings travel in every push/pull
	c.UserEventSizeLimit = 512
	c.EnableNameConflictResolution = false // the loser of a vote would shut itself down
	c.ValidateNodeNames = true
	c.LogOutput, m.LogOutput = nil, nil // both have a Logger
	p.serf(c)
	return c
}
