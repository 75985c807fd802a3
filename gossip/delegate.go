package gossip

import (
	"time"

	"github.com/hashicorp/memberlist"
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
	d.n.receive(b[1:], b[0] == relayedType, now)
	d.n.effort.received(time.Since(now))
}

// receive takes one record, and passes on what came by gossip and is news.
func (n *Node) receive(b []byte, byGossip bool, now time.Time) {
	if n.receiveDelta(b) {
		return
	}
	r, err := DecodeReport(b)
	if err != nil {
		n.stats.refuse(err)
		return
	}
	if r.Boot == n.self.Boot {
		return
	}
	n.stats.received.Add(1)
	if byGossip && n.heard.pass(&r) {
		n.back.put(r.Boot, b[:RecordSize], now)
		n.stats.relayed.Add(1)
	}
	switch n.heard.take(&r, now) {
	case verdictNew:
		if n.cfg.OnReport != nil {
			n.cfg.OnReport(r)
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
