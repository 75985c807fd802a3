package gossip

import (
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/grapevine-lb/grapevine/routing"
)

// delegate stands around Serf's: it takes our private messages out of the stream and passes everything else on.
type delegate struct {
	memberlist.Delegate
	n *Node
}

// NotifyMsg is called by memberlist's one packet goroutine, which also carries failure detection: it decodes, stores and
// returns. The bytes are memberlist's and are not kept.
func (d *delegate) NotifyMsg(b []byte) {
	if len(b) == 0 || (b[0] != messageType && b[0] != relayedType) {
		d.Delegate.NotifyMsg(b)
		return
	}
	now := time.Now()
	if b[0] == messageType {
		d.n.receive(b[1:], now)
	} else {
		d.n.receiveRelayed(b[1:], now)
	}
	d.n.effort.received(time.Since(now))
}

// receive takes one record or delta that came directly.
func (n *Node) receive(b []byte, now time.Time) {
	if n.receiveDelta(b) {
		return
	}
	if r, ok := n.decode(b); ok {
		n.hear(&r, now)
	}
}

// receiveRelayed takes the records of one packet, and passes on those that are news.
func (n *Node) receiveRelayed(b []byte, now time.Time) {
	for len(b) > 0 {
		record := b[:min(RecordSize, len(b))]
		b = b[len(record):]
		r, ok := n.decode(record)
		if !ok {
			continue
		}
		if n.heard.pass(&r) {
			n.back.put(record, now)
			n.stats.relayed.Add(1)
		}
		n.hear(&r, now)
	}
}

// decode reads a record and counts it; false if it is not one, or our own.
func (n *Node) decode(b []byte) (routing.Report, bool) {
	r, err := DecodeReport(b)
	if err != nil {
		n.stats.refuse(err)
		return r, false
	}
	if r.Boot == n.self.Boot {
		return r, false
	}
	n.stats.received.Add(1)
	return r, true
}

// hear orders a record among those of its sender and hands it on if it is news.
func (n *Node) hear(r *routing.Report, now time.Time) {
	switch n.heard.take(r, now) {
	case verdictNew:
		if n.cfg.OnReport != nil {
			n.cfg.OnReport(*r)
		}
	case verdictOld:
		n.stats.old.Add(1)
	case verdictParked:
		n.stats.parked.Add(1)
		n.book.revive(r.Boot)
	case verdictFull:
		n.stats.flooded.Add(1)
	}
}
