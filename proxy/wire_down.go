package proxy

import (
	"crypto/tls"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/h1"
)

// directWrite is from which size on a piece is written by writev and not copied behind its framing.
const directWrite = 8 << 10

// wireDown answers one request on a connection of our own: head and first piece in one write, then one write a piece.
type wireDown struct {
	c        *wireServerConn
	out      []byte  // what is to be written next
	pb       *[]byte // its memory
	vec      [3][]byte
	chunked  bool
	old      bool // the client speaks HTTP/1.0
	bodiless bool
	close    bool // the connection ends after this answer
	left     int64

	now time.Time // when the head was made, until it is out

	err       error
	finished  bool
	aborted   bool
	tunnelled bool
}

// Head implements Downstream.
func (d *wireDown) Head(h *ResponseHead, flush bool) error {
	d.room()
	b := append(d.out[:0], statusLine(h.Status)...)
	b = appendFields(b, h.Header)
	for _, t := range h.Trailer {
		b = append(append(append(b, "Trailer: "...), t...), '\r', '\n')
	}
	d.left = -1
	switch {
	case h.Status < 200 || h.Status == 204 || h.Status == 304:
		d.bodiless = true
		if h.Status == 304 && h.Length > 0 {
			b = appendLength(b, h.Length)
		}
	case h.Length >= 0:
		b = appendLength(b, h.Length)
		d.left = h.Length
	case d.bodiless:
	case d.old:
		d.close = true
	default:
		d.chunked = true
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	if d.c.s.p.draining.Load() {
		d.close = true
	}
	switch {
	case d.close:
		b = append(b, "Connection: close\r\n"...)
	case d.old:
		b = append(b, "Connection: keep-alive\r\n"...)
	}
	if !h.Header.Has("date") {
		if d.now = h.Now; d.now.IsZero() {
			d.now = time.Now()
		}
		b = appendDate(b, d.now)
	}
	d.out = append(b, '\r', '\n')
	if flush {
		return d.flush()
	}
	return nil
}

// Interim implements interimWriter.
func (d *wireDown) Interim(h Header) error {
	if d.old || d.err != nil {
		return d.err // HTTP/1.0 knows no interim heads
	}
	d.room()
	d.out = append(d.out[:0], "HTTP/1.1 102 Processing\r\n"...)
	d.out = append(appendFields(d.out, h), '\r', '\n')
	return d.flush()
}

func appendLength(b []byte, n int64) []byte {
	b = append(b, "Content-Length: "...)
	b = strconv.AppendInt(b, n, 10)
	return append(b, '\r', '\n')
}

// Write implements Downstream.
func (d *wireDown) Write(p []byte) error {
	if d.err != nil {
		return d.err
	}
	if d.bodiless || len(p) == 0 {
		return d.flush()
	}
	if d.left >= 0 {
		if int64(len(p)) > d.left { // more than was announced must not become the next answer
			d.err = io.ErrShortWrite
			return d.err
		}
		d.left -= int64(len(p))
	}
	d.room()
	if len(p) >= directWrite && !isTLS(d.c.nc) {
		return d.writev(p)
	}
	if d.chunked {
		d.out = h1.AppendChunk(d.out, p)
	} else {
		d.out = append(d.out, p...)
	}
	return d.flush()
}

// writev writes a large piece without copying it.
func (d *wireDown) writev(p []byte) error {
	if d.chunked {
		d.out = h1.AppendChunkHead(d.out, len(p))
	}
	vec := net.Buffers(append(d.vec[:0], d.out, p))
	if d.chunked {
		vec = append(vec, crlf)
	}
	d.deadline(time.Now())
	d.err = writeVec(d.c.nc, vec)
	d.vec = [3][]byte{}
	d.rest()
	return d.err
}

// room makes d.out ready for the next piece: a stream that is silent holds none.
func (d *wireDown) room() {
	if d.pb == nil {
		d.pb = outPieces.Get().(*[]byte)
		d.out = (*d.pb)[:0]
	}
}

// rest gives the memory of what has been written back.
func (d *wireDown) rest() {
	if d.pb == nil {
		return
	}
	if cap(d.out) <= oneWrite {
		*d.pb = d.out[:0]
	}
	outPieces.Put(d.pb)
	d.pb, d.out = nil, nil
}

var crlf = []byte("\r\n")

func (d *wireDown) flush() error {
	if d.err != nil || len(d.out) == 0 {
		d.rest()
		return d.err
	}
	now := d.now
	if d.now = (time.Time{}); now.IsZero() {
		now = time.Now()
	}
	d.deadline(now)
	_, d.err = d.c.nc.Write(d.out)
	d.rest()
	return d.err
}

// writeNow writes a piece over s as far as the client takes it without a wait. False: drain must write the rest.
func (d *wireDown) writeNow(s *sock, p []byte) (whole bool, err error) {
	d.room()
	if d.chunked {
		d.out = h1.AppendChunk(d.out, p)
	} else {
		d.out = append(d.out, p...)
	}
	t, _ := d.c.nc.(*tls.Conn)
	whole, err = s.writeNow(t, d.out)
	d.rest()
	return whole, err
}

// drain writes what writeNow could not. Its error sticks.
func (d *wireDown) drain(s *sock) {
	d.deadline(time.Now())
	d.err = s.drain()
}

// deadline renews the write deadline now and then: setting it for each chunk would cost more than the chunk.
func (d *wireDown) deadline(now time.Time) {
	if now.Sub(d.c.timed) > writeTimeout/8 {
		d.c.timed = now
		_ = d.c.nc.SetWriteDeadline(now.Add(writeTimeout))
	}
}

// Finish implements Downstream.
func (d *wireDown) Finish(trailer Header) error {
	d.room()
	switch {
	case d.chunked && len(trailer) == 0:
		d.out = append(d.out, h1.LastChunk...)
	case d.chunked:
		d.out = append(d.out, "0\r\n"...)
		d.out = append(appendFields(d.out, trailer), '\r', '\n')
	case d.left > 0 && !d.bodiless:
		d.close, d.aborted = true, true // shorter than announced: the client must see that it was cut
	}
	d.finished = true
	return d.flush()
}

// Abort implements Downstream: the connection ends without the answer's end.
func (d *wireDown) Abort() { d.aborted = true }

// Tunnel implements Downstream.
func (d *wireDown) Tunnel(h *ResponseHead) (io.ReadWriteCloser, error) {
	b := append(d.out[:0], statusLine(h.Status)...)
	b = append(appendFields(b, h.Header), '\r', '\n')
	c := d.c
	if c.watched {
		c.s.p.ends.forget(c.nc, c)
		c.watched = false
	}
	c.finish(false)
	_ = c.nc.SetDeadline(time.Time{})
	if _, err := c.nc.Write(b); err != nil {
		return nil, err
	}
	d.tunnelled = true
	nc := c.nc
	if c.w > c.r {
		nc = &earlyConn{Conn: nc, early: append([]byte(nil), (*c.buf)[c.r:c.w]...)}
		c.drop()
	}
	return nc, nil
}

func isTLS(nc net.Conn) bool { _, ok := nc.(*tls.Conn); return ok }
