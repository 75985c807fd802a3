package gossip

import "github.com/grapevine-lb/grapevine/routing"

// SendDelta sends a change of our prefix digest to the peers that get our records directly. Receivers that find a gap in
// its sequence, and peers beyond the watch set, fetch the whole digest over the peer port. Callers send at most one a
// second. On the wire: type byte, version and kind, then the delta's own form, at most 256 bytes in all.
func (n *Node) SendDelta(d *routing.Delta) {
	n.sendMany(d.Append([]byte{messageType, recordVersion<<4 | kindDigest}))
}

// receiveDelta takes a delta of a known member; b is the message without the type byte. It reports whether b was one.
func (n *Node) receiveDelta(b []byte) bool {
	if len(b) == 0 || b[0] != recordVersion<<4|kindDigest {
		return false
	}
	n.stats.deltas.Add(1)
	d, err := routing.DecodeDelta(b[1:])
	if err != nil {
		n.stats.short.Add(1)
		return true
	}
	if n.cfg.OnDelta != nil && d.Boot != n.self.Boot && n.heard.isMember(d.Boot) {
		n.cfg.OnDelta(d)
	}
	return true
}
