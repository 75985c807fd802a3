package gossip

import (
	"errors"
	"sync/atomic"
)

// counters count what happens to records.
type counters struct {
	records, sent, failed          atomic.Uint64 // records made, packets with records sent, sendings refused by the socket
	received, old, parked, flooded atomic.Uint64
	short, version, kind, boot     atomic.Uint64
	deltas                         atomic.Uint64 // prefix digest deltas received
	joins, joinErrors              atomic.Uint64
	strangers                      atomic.Uint64 // see logBridge
	refused                        atomic.Uint64 // members at addresses that must not be dialled
	relayedOwn, relayed            atomic.Uint64 // records put into the background queue: ours, others'
}

func (c *counters) refuse(err error) {
	switch {
	case errors.Is(err, ErrShort):
		c.short.Add(1)
	case errors.Is(err, ErrVersion):
		c.version.Add(1)
	case errors.Is(err, ErrKind):
		c.kind.Add(1)
	default:
		c.boot.Add(1)
	}
}

// Stats is a picture of the node for status and metrics. Counters grow from the node's start.
type Stats struct {
	Node         string `json:"node"`
	Members      int    `json:"members"`         // alive replicas, ourselves included
	Foreign      int    `json:"foreign"`         // alive members that are no replicas
	Refused      uint64 `json:"refused_members"` // times that a member was no candidate because of its peer address
	Strangers    uint64 `json:"strangers"`       // packets and streams that no key of ours opens, or of another cluster
	HealthScore  int    `json:"health_score"`
	Profile      string `json:"profile"`
	Keyed        bool   `json:"encrypted"`
	RecordsMade  uint64 `json:"records_made"`
	RecordsSent  uint64 `json:"records_sent"` // packets: one record goes to many peers
	SendErrors   uint64 `json:"send_errors"`
	RecordsHeard uint64 `json:"records_received"` // well-formed ones

	RelayedOwn uint64 `json:"relayed_own"`     // records of ours put into the background queue
	Relayed    uint64 `json:"relayed"`         // records of others passed on by it
	Deltas     uint64 `json:"deltas_received"` // of prefix digests
	Queued     int    `json:"relay_queue"`
	Direct     int    `json:"direct"` // peers that get our records directly

	Dropped map[string]uint64 `json:"dropped"` // records by reason: old, parked, flood, short, version, kind, boot

	Parked      int     `json:"parked"` // now
	Rate        float64 `json:"rate"`   // records/s that the budget allows
	HeartbeatMS int64   `json:"heartbeat_ms"`

	Packets       uint64 `json:"packets_sent"` // all UDP, membership included
	Bytes         uint64 `json:"bytes_sent"`   // their payload
	LargestPacket int    `json:"largest_packet"`
	Dials         uint64 `json:"dials"`

	Joins       uint64   `json:"joins"`
	JoinErrors  uint64   `json:"join_errors"`
	Unreachable []string `json:"unreachable,omitempty"` // join addresses that failed last time, each with why
}

// Stats returns the picture. It is cheap enough for every scrape.
func (n *Node) Stats() Stats {
	c, t := &n.stats, &n.hook.traffic
	b := n.pub.currentBudget()
	return Stats{
		Node:         n.name,
		Members:      int(n.book.alive.Load()),
		Foreign:      int(n.book.foreign.Load()),
		Refused:      n.stats.refused.Load(),
		Strangers:    n.stats.strangers.Load(),
		HealthScore:  n.serf.Memberlist().GetHealthScore(),
		Profile:      n.profile.Name,
		Keyed:        len(n.cfg.Keys) > 0,
		RecordsMade:  c.records.Load(),
		RecordsSent:  c.sent.Load(),
		SendErrors:   c.failed.Load(),
		RecordsHeard: c.received.Load(),
		Dropped: map[string]uint64{
			"old": c.old.Load(), "parked": c.parked.Load(), "flood": c.flooded.Load(),
			"short": c.short.Load(), "version": c.version.Load(), "kind": c.kind.Load(), "boot": c.boot.Load(),
		},
		RelayedOwn:    c.relayedOwn.Load(),
		Relayed:       c.relayed.Load(),
		Deltas:        c.deltas.Load(),
		Queued:        n.back.queue.NumQueued(),
		Direct:        len(*n.book.direct.Load()),
		Parked:        n.heard.numParked(),
		Rate:          b.Rate,
		HeartbeatMS:   b.Heartbeat.Milliseconds(),
		Packets:       t.packets.Load(),
		Bytes:         t.bytes.Load(),
		LargestPacket: int(t.largest.Load()),
		Dials:         t.dials.Load(),
		Joins:         c.joins.Load(),
		JoinErrors:    c.joinErrors.Load(),
		Unreachable:   n.join.unreachable(),
	}
}
