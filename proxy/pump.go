package proxy

import (
	"errors"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// pump is the short way of an established event stream between two plain connections: hangups reads it, as one of many, and
// passes on at once what comes, while the exchange's goroutine waits. It takes what goes well; whatever does not (a client that
// is slow, the end, a connection that breaks, an engine that gives up) it gives back to that goroutine, which goes on as if it
// had done all before.
//
// A read that did not fill its buffer has emptied the socket, so the read that would find nothing is left out.
type pump struct {
	x    *exchange
	a    *attempt
	w    *watch
	body *wireBody
	down *wireDown
	back chan struct{} // told when the goroutine is to go on; made once

	unsent   bool // what is left of the newest piece must be waited for
	progress bool // of that piece
	stop     bool // the engine gave up behind it
	err      error
	off      bool // the set did not take the stream

	n       int           // 0 = the other side has ended
	readErr syscall.Errno // of the last read
}

// firstPieces of a stream go by its own goroutine: its beginning has most to do, and an error as the first piece is common.
const firstPieces = 1

var errNotTaken = errors.New("the stream stays with its goroutine")

// pumped returns the stream's pump, nil if the connections are none for it.
func (x *exchange) pumped(a *attempt, w *watch, b *wireBody) *pump {
	d, ok := x.down.(*wireDown)
	if !ok || !isSock(d.c.nc) || !isSock(b.c.nc) || d.bodiless || !x.p.ends.relays() {
		return nil
	}
	m := &x.pump
	if m.back == nil {
		m.back = make(chan struct{}, 1)
	}
	*m = pump{x: x, a: a, w: w, body: b, down: d, back: m.back}
	return m
}

// run relays until something needs the loop. over: the exchange came to v.
func (m *pump) run() (v verdict, o routing.Outcome, over bool) {
	x, b := m.x, m.body
	if m.off || b.done || b.closed || b.c.buf != nil {
		return 0, 0, false
	}
	s := b.c.nc.(*sock)
	for {
		m.unsent, m.stop, m.err = false, false, nil
		err := x.p.ends.relay(s, m)
		m.off = err == errNotTaken
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
			switch {
			case b.done:
				b.end()
			case !m.off || s.comeBack() != nil:
				b.fail(err)
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
