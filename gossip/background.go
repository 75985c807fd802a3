package gossip

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/grapevine-lb/grapevine/routing"
)

// relayedType is the first byte of a message with records that travel by gossip instead of directly: who gets one passes
// it on. The records follow each other, each RecordSize long.
const relayedType = 0xC8

// Background numbers.
const (
	relayTimes   = 4    // packets a record goes into at each node that learns it; 4 cover about 98 % of the members
	relayPacket  = 1200 // bytes of a packet with relayed records, all but the IP and UDP headers
	queuedBytes  = 64   // of a record in such a packet, headers shared out
	relayShare   = 0.85 // of what the packets can carry, so that the queue runs empty
	minBackRate  = 0.05
	maxBackRate  = 1.0
	spreadRounds = 20 // rounds that a record needs at most to reach nearly all of 1,000 members
)

// background is the queue for those who do not get records directly (more than 128 peers). A newer record of a member
// takes the place of an older one, so the queue never holds more than one record a member and never an outdated one.
//
// It is emptied by packets of its own. In Serf's packets, behind what Serf has to say, records starved for half a minute
// after the start of 300 agents, whose joins filled every packet: their age was 23 s at p99.
type background struct {
	queue memberlist.TransmitLimitedQueue
	wake  chan struct{} // one token: the queue is not empty
}

func newBackground() *background {
	b := &background{wake: make(chan struct{}, 1)}
	// The number of sendings is RetransmitMult·ceil(log10(nodes+1)); with one node that is relayTimes.
	b.queue.RetransmitMult, b.queue.NumNodes = relayTimes, func() int { return 1 }
	return b
}

// relayed is one record in the queue.
type relayed struct {
	name   string // the origin's boot id, as in the record
	record []byte
	at     time.Time
}

// Invalidates is not asked for named broadcasts, but the interface wants it.
func (r *relayed) Invalidates(o memberlist.Broadcast) bool {
	x, ok := o.(*relayed)
	return ok && x.name == r.name
}

// Name makes newer records of one origin supersede older ones.
func (r *relayed) Name() string { return r.name }

// Message returns the record, aged by the time that it lay here.
func (r *relayed) Message() []byte {
	m := slices.Clone(r.record)
	m[RecordSize-1] = packAge(time.Duration(m[RecordSize-1])*ageUnit + time.Since(r.at))
	return m
}

// Finished needs no action.
func (r *relayed) Finished() {}

// put queues a record of RecordSize bytes.
func (b *background) put(record []byte, now time.Time) {
	b.queue.QueueBroadcast(&relayed{name: string(record[4:12]), record: slices.Clone(record), at: now})
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// spread is the goroutine that empties the queue: each round sends relayTimes packets to as many members drawn at random,
// so that a record that is news in one round has gone out as often as it shall by its end.
func (n *Node) spread(ctx context.Context) {
	room := relayPacket - 2 - cryptBytes - 2 - len(n.cfg.Cluster) // both type bytes, key, label
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.back.wake:
		}
		for n.back.queue.NumQueued() > 0 {
			began, sent := time.Now(), 0
			ts := *n.book.targets.Load()
			if len(ts) == 0 {
				n.back.queue.Reset() // nobody to tell
				break
			}
			for range min(relayTimes, len(ts)) {
				records := n.back.queue.GetBroadcasts(0, room)
				if len(records) == 0 {
					break
				}
				msg := append([]byte{relayedType}, slices.Concat(records...)...)
				if err := n.serf.Memberlist().SendToAddress(ts[rand.IntN(len(ts))].addr, msg); err != nil {
					n.stats.failed.Add(1)
				}
				sent++
			}
			n.effort.sent(sent, time.Since(began))
			if !sleep(ctx, jitter(roundGap(&n.profile))) {
				return
			}
		}
	}
}

// roundGap is the time between two rounds:
//
//	gap = packets a round · (packet + headers) ÷ bytes/s
func roundGap(p *Profile) time.Duration {
	return relayTimes * (relayPacket + 28) * time.Second / time.Duration(p.Background)
}

// backgroundRate is how often each of so many members may put a record into everybody's queue, records/s:
//
//	rate = 0.85 · bytes/s ÷ 64 ÷ (members · 4), between 0.05 and 1
func backgroundRate(p *Profile, members int) float64 {
	sendings := relayShare * float64(p.Background) / queuedBytes
	return min(max(sendings/float64(max(members, 1)*relayTimes), minBackRate), maxBackRate)
}

// backgroundPromise is the heartbeat in a relayed record: its period with jitter and the time it needs to spread.
func backgroundPromise(p *Profile, members int) time.Duration {
	period := time.Duration(float64(time.Second) / backgroundRate(p, members))
	return time.Duration(1.2*float64(period)) + spreadRounds*roundGap(p)
}

// crowded reports whether there are too many peers to send to each.
func (n *Node) crowded() bool { return len(*n.book.targets.Load()) > n.profile.DirectMax }

// relayOwn puts our newest report into the queue.
func (n *Node) relayOwn(r routing.Report) {
	members := len(*n.book.targets.Load()) + 1
	n.Stamp(&r)
	r.Heartbeat = backgroundPromise(&n.profile, members)
	n.back.put(EncodeReport(nil, &r), time.Now())
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
