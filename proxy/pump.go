package proxy

import (
	"crypto/tls"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// pump is the short way of an established event stream between two connections of ours, plain or TLS: hangups reads it, as one of many, and
// passes on at once what comes. The exchange is parked meanwhile and has no goroutine, whose stack would be half of what a silent
// stream holds. The pump takes what goes well; whatever does not (a client that is slow, the end, a connection that breaks, an
// engine that gives up) it gives back to a new goroutine, which goes on as if the exchange had never been parked.
//
// A read that did not fill its buffer has emptied the socket, so the read that would find nothing is left out.
type pump struct {
	x      *exchange
	a      *attempt
	body   *wireBody
	in     *sock     // its connection
	secure *tls.Conn // over in; nil = it is plain
	down   *wireDown

	unsent   bool // what is left of the newest piece must be waited for
	progress bool // of that piece
	stop     bool // the engine gave up behind it
	err      error
	off      bool // the set did not take the stream
	first    int8 // pieces that the goroutine relays before

	end error // why nothing more can be read; nil = it can
}

// firstPieces of a stream go by its own goroutine: its beginning has most to do, and an error as the first piece is common.
const firstPieces = 1

// pumped returns the stream's pump, nil if the connections are none for it.
func (x *exchange) pumped(a *attempt, b *wireBody) *pump {
	d, ok := x.down.(*wireDown)
	if !ok || d.bodiless || !x.p.ends.relays() {
		return nil
	}
	in, out := sockOf(b.c.nc), sockOf(d.c.nc)
	if in == nil || out == nil || !d.c.watched { // else a read of its own waits for the client's end
		return nil
	}
	d.sock = out
	x.pump = pump{x: x, a: a, body: b, in: in, down: d, first: firstPieces}
	x.pump.secure, _ = b.c.nc.(*tls.Conn)
	return &x.pump
}

// takes reports whether the pump takes the stream over now.
func (m *pump) takes() bool {
	if m == nil {
		return false
	}
	if m.first > 0 {
		m.first--
		return false
	}
	return !m.off && !m.body.done && !m.body.closed && m.body.c.buf == nil && m.body.sent()
}

// shed lets go of the heads: the answer's is out, and of the request's only what a continuation sends again is needed.
func (m *pump) shed() {
	m.a.ans.Head.Header = nil
	m.body.reply.dropHead()
	m.x.in.Header, m.down.c.head.fields = nil, nil
}

// park has the set read the stream. After that the exchange and its connections are whoever's the set gives them back to; with
// an error they stay the caller's, who goes on with it as if they had been given back.
func (m *pump) park() error {
	m.unsent, m.stop, m.err, m.end = false, false, nil, nil
	err := m.x.p.ends.take(m)
	if err != nil {
		m.off = true
	}
	return err
}

// back is called by the set when it reads the stream no more.
func (m *pump) back() { go m.down.c.unpark() }

// given is how the set's reading ended.
func (m *pump) given() error {
	m.in.done()
	return m.end
}

// settle does what the pump could not, after reading ended with err. over: the attempt came to v.
func (m *pump) settle(err error) (v verdict, o routing.Outcome, over bool) {
	x, b := m.x, m.body
	if m.unsent {
		at := x.watch.pause()
		m.down.drain()
		x.watch.resume(at, m.progress)
	}
	switch {
	case m.down.err != nil:
		return x.stopped(), routing.OutcomeCancelled, true
	case m.stop:
		v, o = x.gaveUp()
		return v, o, true
	case b.done:
		b.end()
	case m.off:
		if m.in.comeBack() != nil {
			b.fail(err)
		}
	case m.err != nil || err != nil:
		b.fail(err)
	}
	return 0, 0, false // the loop hands the stream over again, or finds the body at its end, or closed
}

// take passes a piece on, as it came from the engine. False ends the pumping.
func (m *pump) take(p []byte) bool {
	x, b := m.x, m.body
	var n int
	if n, m.err = b.payload(p); n == 0 {
		return m.err == nil && !b.done
	}
	now := time.Now()
	pass, progress, stop := x.piece(m.a, x.watch, p[:n], true, now)
	m.stop = stop
	if len(pass) > 0 {
		m.unsent, m.progress = !m.down.writeNow(pass), progress
		x.p.metrics.bytesOut.Add(uint64(len(pass)))
	}
	if progress && !m.unsent {
		x.watch.progressAt(now)
	}
	return m.err == nil && !m.stop && !m.unsent && !b.done && m.down.err == nil
}
