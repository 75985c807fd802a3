package proxy

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// pump is the short way of an event stream between two plain connections: one read and one write a piece, and nothing in
// between that waits, asks the scheduler or reads in vain. It takes what goes well; whatever does not (a client that is
// slow, the end, a connection that breaks, an engine that gives up) it leaves to the relay's loop, as if that had done
// all before. It works on the exchange's goroutine.
//
// The read side stays within one wait for readiness (sock.pump), so that no notice of new data gets lost, and a read that
// did not fill its buffer has emptied the socket: the read that would find nothing is left out. What such a read would
// have found, the end of the other side, is told by hangups.
type pump struct {
	x    *exchange
	a    *attempt
	w    *watch
	body *wireBody
	down *wireDown
	sink func(p []byte) bool // method take, made once

	unsent   bool // what is left of the newest piece must be waited for
	progress bool // of that piece
	stop     bool // the engine gave up behind it
	err      error
}

// pumped returns the stream's pump, nil if the connections are none for it.
func (x *exchange) pumped(a *attempt, w *watch, b *wireBody) *pump {
	d, ok := x.down.(*wireDown)
	if !ok || !isSock(d.c.nc) || d.bodiless || !b.watchEnd(x.p.ends) {
		return nil
	}
	m := &x.pump
	if m.sink == nil {
		m.sink = m.take
	}
	*m = pump{x: x, a: a, w: w, body: b, down: d, sink: m.sink}
	return m
}

// run relays until something needs the loop. over: the exchange came to v.
func (m *pump) run() (v verdict, o routing.Outcome, over bool) {
	x, b := m.x, m.body
	if b.done || b.closed || b.c.buf != nil {
		return 0, 0, false
	}
	for {
		m.unsent, m.stop, m.err = false, false, nil
		err := b.c.nc.(*sock).pump(m.sink)
		if m.unsent {
			at := m.w.pause()
			_ = m.down.flush() // sticks
			m.w.resume(at, m.progress)
		}
		switch {
		case m.down.err != nil:
			return x.stopped(), routing.OutcomeCancelled, true
		case m.stop:
			v, o = x.gaveUp()
			return v, o, true
		case m.err != nil || err != nil || b.done:
			if !b.done {
				b.fail(err)
			} else {
				b.end()
			}
			return 0, 0, false // the loop finds the body at its end, or closed
		}
	}
}

// take passes a piece on, as it came from the engine. False ends the pumping.
func (m *pump) take(p []byte) bool {
	x, b := m.x, m.body
	var n int
	if n, m.err = b.payload(p); n == 0 {
		return m.err == nil && !b.done
	}
	now := time.Now()
	pass, progress, stop := x.piece(m.a, m.w, p[:n], true, now)
	m.stop = stop
	if len(pass) > 0 {
		m.unsent, m.progress = !m.down.writeNow(pass), progress
		x.p.metrics.bytesOut.Add(uint64(len(pass)))
	}
	if progress && !m.unsent {
		m.w.progressAt(now)
	}
	return m.err == nil && !m.stop && !m.unsent && !b.done && m.down.err == nil
}
