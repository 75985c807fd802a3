package proxy

import (
	"crypto/tls"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/h1"
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
	out    *sock // its connection

	between  bool      // the next byte begins a chunk
	same     bool      // the client gets chunks too, and not in records of TLS: what came may go out as it is
	unsent   bool      // what is left of the newest piece must be waited for
	progress bool      // of that piece
	stop     bool      // the engine gave up behind it
	off      bool      // the set did not take the stream
	first    int8      // pieces that the goroutine relays before
	at       time.Time // when the newest piece came
	err      error

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
	x.pump = pump{x: x, a: a, body: b, in: in, down: d, out: out, first: firstPieces}
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
	m.between, m.same = m.body.betweenChunks(), m.down.chunked && !isTLS(m.down.c.nc)
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
	m.out.done()
	return m.end
}

// settle does what the pump could not, after reading ended with err. over: the attempt came to v.
func (m *pump) settle(err error) (v verdict, o routing.Outcome, over bool) {
	x, b := m.x, m.body
	x.count(m.a, m.at)
	if m.unsent {
		at := x.watch.pause()
		m.down.drain(m.out)
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

// mostUncounted is how many pieces of content the account may not know of: what it has of a request lies elsewhere in memory.
const mostUncounted = 8

// take passes a piece on, as it came from the engine. False ends the pumping. Most pieces are one chunk with one event, and go out as
// they came; then neither the engine's nor the client's side of the exchange is looked at.
func (m *pump) take(p []byte) bool {
	x := m.x
	var data, chunk []byte
	if m.between {
		data = h1.OneChunk(p)
	}
	if data == nil {
		b := m.body
		var n int
		n, m.err = b.payload(p)
		m.between = b.betweenChunks()
		if n == 0 {
			return m.err == nil && !b.done
		}
		data = p[:n]
	} else if m.same {
		chunk = p
	}
	now := time.Now()
	m.at = now
	pass, progress, stop := x.piece(m.a, x.watch, data, true, now)
	m.stop = stop
	if x.sift.scan.tokens-x.counted >= mostUncounted {
		x.count(m.a, now)
	}
	whole := true
	var err error
	switch {
	case len(pass) == 0:
	case chunk != nil && len(pass) == len(data) && &pass[0] == &data[0]:
		whole, err = m.out.writeNow(nil, chunk)
	default:
		chunk = nil
		whole, err = m.down.writeNow(m.out, pass)
	}
	x.p.metrics.bytesOut.Add(uint64(len(pass)))
	if !whole || err != nil {
		m.unsent, m.progress, m.down.err = !whole, progress, err
		return false
	}
	if progress {
		x.watch.progressAt(now)
	}
	return !m.stop && m.err == nil && (chunk != nil || !m.body.done)
}
