package gossip

import (
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// publisher holds the newest report of our own until the pacer lets it go out.
type publisher struct {
	wake chan struct{} // one token: look again

	mu      sync.Mutex
	pace    *pacer
	peers   int // that the budget was made for
	packets int // packet budget, lowered by shedding
	cur     routing.Report
	at      time.Time // when cur was offered; zero: never
	waiting []chan struct{}
	stopped bool
}

func newPublisher(b Budget) *publisher {
	return &publisher{wake: make(chan struct{}, 1), pace: newPacer(b), packets: packetBudget, peers: -1}
}

// Offer gives the node the newest load of our own replica. The node decides when it goes out: on a significant change
// and as a heartbeat, within the budget. Boot, Seq and Heartbeat are the node's to set.
func (n *Node) Offer(r routing.Report) { n.pub.offer(r, 0) }

// PublishNow sends r at once and again until it was sent so many times, 100 ms apart (newer offers take its place in the
// repeats). The channel is closed after the last one; at once if no other member is alive, and at the end of Run.
func (n *Node) PublishNow(r routing.Report, times int) <-chan struct{} {
	if len(*n.book.targets.Load()) == 0 {
		n.pub.offer(r, 0)
		done := make(chan struct{})
		close(done)
		return done
	}
	return n.pub.offer(r, max(times, 1))
}

func (p *publisher) offer(r routing.Report, times int) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cur, p.at = r, time.Now()
	var done chan struct{}
	if times > 0 {
		done = make(chan struct{})
		if p.stopped {
			close(done)
		} else {
			p.pace.burst(times, p.at)
			p.waiting = append(p.waiting, done)
		}
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return done
}

func (p *publisher) currentBudget() Budget {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pace.budget
}

// current returns the newest report, aged to now.
func (p *publisher) current(now time.Time) (routing.Report, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.cur
	r.Age += now.Sub(p.at)
	return r, !p.at.IsZero()
}

// take returns the record to send now, or how long to wait.
func (p *publisher) take(n *Node, now time.Time) (r routing.Report, send, urgent bool, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if peers := len(*n.book.direct.Load()); peers != p.peers {
		p.peers = peers
		p.pace.setBudget(n.budget(peers, p.packets), now)
	}
	if p.at.IsZero() {
		return r, false, false, time.Hour
	}
	r = p.cur
	r.Age += now.Sub(p.at)
	send, wait = p.pace.due(&r, now)
	if !send {
		return r, false, false, wait
	}
	urgent = compare(&p.pace.sent, &r) == changeUrgent
	p.pace.wrote(&r, now)
	n.stampLocked(&r)
	return r, true, urgent, 0
}

// sentOne closes the waits of bursts that are over.
func (p *publisher) sentOne() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pace.repeats == 0 {
		p.release()
	}
}

func (p *publisher) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	p.release()
}

func (p *publisher) release() {
	for _, c := range p.waiting {
		close(c)
	}
	p.waiting = nil
}

// Stamp makes r a record of ours for another way than gossip, such as the header between agents: it sets Boot, Heartbeat
// and the next Seq, so that of two records the one stamped later wins at every peer.
func (n *Node) Stamp(r *routing.Report) {
	n.pub.mu.Lock()
	defer n.pub.mu.Unlock()
	n.stampLocked(r)
}

func (n *Node) stampLocked(r *routing.Report) {
	n.seq++
	r.Boot, r.Seq, r.Heartbeat = n.self.Boot, n.seq, n.pub.pace.promise()
}

// publish is the goroutine that sends records.
func (n *Node) publish(ctx context.Context) {
	defer n.pub.stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		r, send, urgent, wait := n.pub.take(n, time.Now())
		if send {
			n.sendAll(&r)
			if urgent && n.crowded() {
				n.relayOwn(r)
			}
			n.pub.sentOne()
			continue
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case <-n.pub.wake:
		case <-timer.C:
		}
	}
}

// sendAll sends a record to its targets.
func (n *Node) sendAll(r *routing.Report) {
	n.stats.records.Add(1)
	n.sendMany(EncodeReport([]byte{messageType}, r))
}

// sendMany sends one message to all that get our records directly.
func (n *Node) sendMany(msg []byte) {
	packet, err := n.packet(msg)
	if err != nil {
		n.stats.failed.Add(1)
		return
	}
	for ts := range slices.Chunk(*n.book.direct.Load(), 32) {
		began := time.Now()
		for _, t := range ts {
			n.sendPacket(t, packet)
		}
		n.effort.sent(len(ts), time.Since(began))
		runtime.Gosched() // a long fan-out should not hold up a request
	}
}

// sendTo sends a message to one member.
func (n *Node) sendTo(t target, msg []byte) {
	packet, err := n.packet(msg)
	if err != nil {
		n.stats.failed.Add(1)
		return
	}
	n.sendPacket(t, packet)
}

func (n *Node) sendPacket(t target, packet []byte) {
	if _, err := n.hook.WriteToAddress(packet, t.addr); err != nil {
		n.stats.failed.Add(1)
		return
	}
	n.stats.sent.Add(1)
}

// greet sends a new member what the others know already, so that it need not wait for the next heartbeat.
func (n *Node) greet(boot uint64, now time.Time) {
	r, ok := n.pub.current(now)
	if !ok {
		return
	}
	ts := *n.book.targets.Load()
	if n.crowded() && rand.IntN(len(ts)) >= n.profile.DirectMax {
		return // 128 greetings are enough; the queue brings the rest
	}
	n.Stamp(&r)
	if n.crowded() {
		r.Heartbeat = backgroundPromise(&n.profile, len(ts)+1)
	}
	for _, t := range ts {
		if t.boot == boot {
			n.sendTo(t, EncodeReport([]byte{messageType}, &r))
		}
	}
}
