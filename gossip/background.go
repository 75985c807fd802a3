package gossip

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/grapevine-lb/grapevine/routing"
)

// relayedType is the first byte of a record that travels by gossip instead of directly: who gets it passes it on.
const relayedType = 0xC8

// Background numbers.
const (
	relayTimes   = 4  // packets a record goes into at each node that learns it; 4 cover about 98 % of the members
	queuedBytes  = 64 // of a record in a packet of the queue
	packetRoom   = 17 // records in a packet of 1,200 bytes
	wireShare    = 0.75
	minBackRate  = 0.05
	maxBackRate  = 1.0
	spreadRounds = 20 // gossip intervals that a record needs to reach nearly all of 1,000 members
)

// background is the queue for those who do not get records directly (more than 128 peers). A newer record of a member
// takes the place of an older one, so the queue never holds more than one record a member and never an outdated one.
type background struct {
	queue memberlist.TransmitLimitedQueue
}

func newBackground() *background {
	b := &background{}
	// The number of sendings is RetransmitMult·ceil(log10(nodes+1)); with one node that is relayTimes.
	b.queue.RetransmitMult, b.queue.NumNodes = relayTimes, func() int { return 1 }
	return b
}

// relayed is one record in the queue.
type relayed struct {
	name string // the origin's boot id
	msg  []byte // type byte and record
	at   time.Time
}

// Invalidates is not asked for named broadcasts, but the interface wants it.
func (r *relayed) Invalidates(o memberlist.Broadcast) bool {
	x, ok := o.(*relayed)
	return ok && x.name == r.name
}

// Name makes newer records of one origin supersede older ones.
func (r *relayed) Name() string { return r.name }

// Message returns the bytes to send, aged by the time that the record lay here.
func (r *relayed) Message() []byte {
	m := slices.Clone(r.msg)
	i := len(m) - 1
	if len(m) == 1+RecordSize {
		m[i] = packAge(time.Duration(m[i])*ageUnit + time.Since(r.at))
	}
	return m
}

// Finished needs no action.
func (r *relayed) Finished() {}

func (b *background) put(boot uint64, record []byte, now time.Time) {
	msg := append(make([]byte, 0, 1+len(record)), relayedType)
	b.queue.QueueBroadcast(&relayed{name: fmt.Sprintf("%016x", boot), msg: append(msg, record...), at: now})
}

// GetBroadcasts gives Serf's messages first and fills what is left of the packet with records. The remaining room, not
// the whole, is passed on: a packet that grew beyond the limit would lose its last messages.
func (d *delegate) GetBroadcasts(overhead, limit int) [][]byte {
	msgs := d.Delegate.GetBroadcasts(overhead, limit)
	for _, m := range msgs {
		limit -= len(m) + overhead
	}
	if limit < overhead+1+RecordSize {
		return msgs
	}
	return append(msgs, d.n.back.queue.GetBroadcasts(overhead, limit)...)
}

// backgroundRate is how often each of so many members may put a record into everybody's queue, records/s:
//
//	rate = min(bytes/s ÷ 64, what the packets of Serf's gossip carry · 0.75) ÷ (members · 4), between 0.05 and 1
func backgroundRate(p *Profile, members int) float64 {
	wire := float64(p.GossipNodes) / p.GossipInterval.Seconds() * packetRoom * wireShare
	sendings := min(float64(p.Background)/queuedBytes, wire)
	return min(max(sendings/float64(max(members, 1)*relayTimes), minBackRate), maxBackRate)
}

// backgroundPromise is the heartbeat in a relayed record: its period with jitter and the time it needs to spread.
func backgroundPromise(p *Profile, members int) time.Duration {
	period := time.Duration(float64(time.Second) / backgroundRate(p, members))
	return time.Duration(1.2*float64(period)) + spreadRounds*p.GossipInterval
}

// crowded reports whether there are too many peers to send to each.
func (n *Node) crowded() bool { return len(*n.book.targets.Load()) > n.profile.DirectMax }

// relayOwn puts our newest report into the queue.
func (n *Node) relayOwn(r routing.Report) {
	members := len(*n.book.targets.Load()) + 1
	n.Stamp(&r)
	r.Heartbeat = backgroundPromise(&n.profile, members)
	n.back.put(n.self.Boot, EncodeReport(nil, &r), time.Now())
	n.stats.relayedOwn.Add(1)
}

// publishBackground is the goroutine that feeds the queue while there are too many peers.
func (n *Node) publishBackground(ctx context.Context) {
	for {
		period := time.Second
		if n.crowded() {
			members := len(*n.book.targets.Load()) + 1
			n.heard.expect(backgroundPromise(&n.profile, members))
			if r, ok := n.pub.current(time.Now()); ok {
				n.relayOwn(r)
			}
			period = time.Duration(float64(time.Second) / backgroundRate(&n.profile, members))
		} else {
			n.heard.expect(n.profile.Heartbeat)
		}
		if !sleep(ctx, jitter(period)) {
			return
		}
	}
}
