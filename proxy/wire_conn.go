package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/guard"
	"github.com/grapevine-lb/grapevine/proxy/h1"
)

// Limits of a client's connection. None bounds the time of a request's body as a whole, or of an answer.
const (
	headTimeout  = 10 * time.Second  // from a head's first byte to its end; bodies have a pace, see access.go
	idleTimeout  = 650 * time.Second // between requests: longer than balancers keep a connection (600 s, 350 s), or they would meet our end of it
	bodyTimeout  = time.Minute       // silence in the middle of a body
	writeTimeout = 2 * time.Minute   // a client that takes nothing for so long is gone
	lingerTime   = 500 * time.Millisecond
	lingerBytes  = 256 << 10
)

var (
	errClientGone = errors.New("the client hung up")
	h2Preface     = []byte("PRI * HTTP/2.0\r\n\r\n")
)

// wireServerConn is a client's (or an entry agent's) connection. Its goroutine serves one request after another.
type wireServerConn struct {
	s      *Server
	nc     net.Conn
	due    time.Time // the deadline of reads, if it is that of the next request
	over   time.Time // when the last request was; zero = look
	remote string    // its address
	peer   uint64    // boot id that its certificate proves

	serving atomic.Bool  // a request is here whole, as far as its head goes
	since   atomic.Int64 // when it was not, ns since 1970

	headBuf
	req   *h1.Request // the head that is being read, until it is kept
	timed time.Time   // when the deadline of writes was set
	in    RequestHead
	head  *wireHead // its memory
	body  wireRequestBody
	down  wireDown

	parked *exchange // its stream is read by the set, and the connection has no goroutine

	watched bool // hangups tells when the client ends its side
	mu      sync.Mutex
	idle    bool // between requests: Shutdown may set the deadline of reads
	ended   bool
	life    *life         // of the exchange under way
	ahead   chan struct{} // closed when the read-ahead of an unwatched connection has ended
}

func (c *wireServerConn) serve() {
	c.remote = c.nc.RemoteAddr().String()
	h2, err := handshake(c.nc)
	switch {
	case err != nil:
		_ = c.nc.Close()
		c.s.untrack(c)
		return
	case h2:
		c.s.handOff(c.nc, nil)
		c.s.untrack(c)
		return
	}
	if c.s.role == roleTarget {
		c.peer = c.s.p.provenBoot(c.nc)
	}
	c.watched = c.s.p.ends.watch(c.nc, c)
	c.over = time.Now()
	c.since.Store(c.over.UnixNano())
	c.setIdle(true)
	c.live(fateNext)
}

// fate is what a request leaves of its connection.
type fate uint8

const (
	fateOver   fate = iota // nothing, or it has another owner (then nc is nil)
	fateNext               // it waits for another request
	fateParked             // the request's stream goes on without a goroutine
)

// live goes on with the connection after a request, until it is over or its stream parked.
func (c *wireServerConn) live(f fate) {
	for {
		switch f {
		case fateNext:
			c.serving.Store(false)
			f = c.one()
			continue
		case fateParked:
			wg := &c.s.wg // whoever waits for the connections waits for this one too
			wg.Add(1)
			err := c.parked.pump.park()
			if err == nil {
				return
			}
			wg.Done()
			f = c.resume(err)
			continue
		}
		break
	}
	if c.watched {
		c.s.p.ends.forget(c.nc, c)
	}
	if c.nc != nil {
		_ = c.nc.Close()
	}
	c.drop()
	c.s.untrack(c)
}

// unpark goes on with the parked request and the connection.
func (c *wireServerConn) unpark() {
	defer c.s.wg.Done()
	c.live(c.resume(c.parked.pump.given()))
}

// resume goes on with the parked request; err is how the set's reading ended.
func (c *wireServerConn) resume(err error) fate {
	x := c.parked
	if x.resume(err); x.parked {
		return fateParked
	}
	c.parked = nil
	return c.answered(x)
}

// one waits for a request and serves it. The wait has little on its stack, so that the next collection makes that of a silent connection small.
func (c *wireServerConn) one() fate {
	n, err := c.readHead()
	return c.request(n, err)
}

// request serves the request whose head is the next n bytes.
func (c *wireServerConn) request(n int, err error) fate {
	c.serving.Store(true)
	c.s.p.ends.request()
	switch {
	case err != nil:
		c.setIdle(false)
		c.refuse(err)
		return fateOver
	case n == 0 || c.s.forStd(c.req.Target):
		if c.watched {
			c.s.p.ends.forget(c.nc, c)
			c.watched = false
		}
		c.setIdle(false)
		_ = c.nc.SetDeadline(time.Time{})
		c.s.handOff(c.nc, (*c.buf)[c.r:c.w])
		c.nc = nil
		return fateOver
	}
	c.keepHead(n)
	d, q := &c.down, c.req
	d.rest()
	*d = wireDown{c: c, old: q.Minor == 0, bodiless: string(q.Method) == "HEAD",
		close: q.Close || c.s.closing.Load() || c.s.p.draining.Load()}
	c.body = wireRequestBody{c: c, frame: q.Framing, left: q.Length, ask: q.Continue}
	var src io.Reader
	if q.Length != 0 {
		src = &c.body
	} else {
		c.body.done = true
	}
	c.req = nil
	requests.Put(q)
	x := c.s.p.exchange()
	c.begin(x.life)
	if x.serve(c.s.role, &c.in, src, d); x.parked {
		c.parked = x
		return fateParked
	}
	return c.answered(x)
}

// answered ends a request.
func (c *wireServerConn) answered(x *exchange) fate {
	d := &c.down
	f := fateNext // also while the server shuts down: the client was not told that this was the last
	if d.tunnelled || d.aborted || d.err != nil || !d.finished || !c.body.done || d.close {
		f = fateOver
	}
	c.over = x.over
	c.since.Store(c.over.UnixNano()) // before finish: Shutdown may look then
	c.finish(f == fateNext)
	x.recycle()
	c.dropHead()
	switch {
	case d.tunnelled:
		c.nc = nil
	case d.aborted || d.err != nil || !d.finished:
	case !c.body.done:
		// An answer before the end of the body, an error mostly. What is on its way must be taken in, or the client's
		// stack throws the answer away with the reset.
		c.linger()
	case d.close && c.w > c.r:
		c.linger()
	}
	return f
}

// readHead reads until a request's head is whole and returns its size; 0 means that HTTP/2 begins.
func (c *wireServerConn) readHead() (int, error) {
	deadline := idleTimeout
	switch {
	case c.w > c.r:
		deadline = headTimeout // pipelined
	case c.s.closing.Load():
		deadline = lastWord
	}
	c.readBy(deadline)
	for first := true; ; first = false {
		if c.w > c.r {
			b := (*c.buf)[c.r:c.w]
			if bytes.HasPrefix(b, h2Preface) {
				return 0, nil
			}
			if len(b) >= len(h2Preface) || !bytes.HasPrefix(h2Preface, b) {
				if c.req == nil {
					c.req = requests.Get().(*h1.Request)
				}
				if n, err := h1.ParseRequest(b, c.req); n > 0 || err != nil {
					return n, err
				}
			}
			c.setIdle(false)
			if !first && deadline != headTimeout {
				deadline = headTimeout
				c.readBy(deadline)
			}
		}
		if err := c.more(c.nc); err != nil {
			return 0, err
		}
	}
}

// setIdle says whether the connection is between requests: not until its first byte, and again with the end of each.
func (c *wireServerConn) setIdle(on bool) {
	c.mu.Lock()
	c.idle = on
	c.mu.Unlock()
}

// hurry leaves a connection between requests what is left of lastWord.
func (c *wireServerConn) hurry() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle {
		_ = c.nc.SetReadDeadline(time.Unix(0, c.since.Load()).Add(lastWord))
	}
}

// readBy sets the deadline of reads. One for the next request is renewed now and then only: a client that sends one
// after another would pay for two timers with each.
func (c *wireServerConn) readBy(limit time.Duration) {
	now := c.over
	if c.over = (time.Time{}); now.IsZero() {
		now = time.Now()
	}
	if limit == idleTimeout && c.due.Sub(now) > idleTimeout*7/8 {
		return
	}
	c.due = time.Time{}
	if limit == idleTimeout {
		c.due = now.Add(limit)
	}
	_ = c.nc.SetReadDeadline(now.Add(limit))
}

// requests are heads that are being read.
var requests = sync.Pool{New: func() any { return new(h1.Request) }}

// wireHead is the memory of a head, of a request or an answer. Nothing of it outlives the exchange: what does, the core copies.
type wireHead struct {
	mem    []byte
	fields Header
}

var wireHeads = sync.Pool{New: func() any { return new(wireHead) }}

// dropHead gives the head's memory back. An upgraded exchange may have it in use elsewhere.
func (c *wireServerConn) dropHead() {
	h := c.head
	c.head, c.in = nil, RequestHead{}
	if h != nil && !c.down.tunnelled {
		h.rest()
	}
}

// rest gives the memory back.
func (h *wireHead) rest() {
	if cap(h.mem) <= headPiece {
		clear(h.fields)
		wireHeads.Put(h)
	}
}

// keepHead copies the head, since its strings outlive the buffer, and makes the core's form of it.
func (c *wireServerConn) keepHead(n int) {
	start := c.r
	c.head = wireHeads.Get().(*wireHead)
	own := append(c.head.mem[:0], (*c.buf)[start:start+n]...)
	c.head.mem = own
	at := func(b []byte) string { return unsafeString(moved(own, *c.buf, start, b)) }
	q := c.req
	h := slices.Grow(c.head.fields[:0], len(q.Fields)+1)
	for i, f := range q.Fields {
		if q.Framed.Has(i) {
			continue
		}
		h = append(h, Field{at(f.Name), at(f.Value)})
	}
	c.head.fields = h
	c.in = RequestHead{
		Method: at(q.Method), Target: at(q.Target), Host: at(q.HostValue), Scheme: "http", Remote: c.remote,
		Header: h, Length: q.Length, Peer: c.peer,
	}
	if isTLS(c.nc) {
		c.in.Scheme = "https"
	}
	// Only WebSocket is passed on; h2c above all is not, so that nothing reaches the engine past our rules (C39).
	if strings.EqualFold(unsafeString(q.Upgrade), "websocket") {
		c.in.Upgrade = "websocket"
	}
	q.Method, q.Target = moved(own, *c.buf, start, q.Method), moved(own, *c.buf, start, q.Target)
	c.r += n
	c.dropEmpty()
}

// refuse answers what cannot be accepted, if there is something to answer.
func (c *wireServerConn) refuse(err error) {
	var e *h1.Error
	if !errors.As(err, &e) { // closed, idle too long, or too slow with its head
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.linger() // a request that crosses our end is met by the stream's end, which clients know, and not by a reset
		}
		return
	}
	a := *errBadRequest
	a.Status, a.Message = e.Status, "The request is not valid HTTP/1.1: "+e.Reason+"."
	c.s.p.metrics.refusals.add(a.Reason)
	c.s.p.log.Debug("malformed request", "remote", c.nc.RemoteAddr(), "reason", e.Reason)
	h := &ResponseHead{Status: a.Status}
	a.Headers(0, h.Header.Add)
	b := a.Body()
	h.Length = int64(len(b))
	d := &wireDown{c: c, close: true}
	if d.Head(h, false) == nil && d.Write(b) == nil {
		c.linger()
	}
}

// begin makes a hang-up of the client end the exchange.
func (c *wireServerConn) begin(l *life) {
	c.mu.Lock()
	c.idle = false
	c.life = l
	ended := c.ended
	c.mu.Unlock()
	if ended {
		l.end(errClientGone)
	}
	if c.body.done {
		c.listen()
	}
}

// listen watches a connection that hangups cannot, once the request is here whole: by a read of one byte.
func (c *wireServerConn) listen() {
	if c.watched || c.ahead != nil || c.w > c.r {
		return
	}
	c.due = time.Time{}
	_ = c.nc.SetReadDeadline(time.Time{})
	done := make(chan struct{})
	c.ahead = done
	go func() {
		defer close(done)
		var b [1]byte
		n, err := c.nc.Read(b[:])
		if n > 0 {
			c.putBack(b[:n])
		}
		var ne net.Error
		if err != nil && !(errors.As(err, &ne) && ne.Timeout()) {
			c.hungUp()
		}
	}()
}

// finish undoes begin; idle means that another request may come.
func (c *wireServerConn) finish(idle bool) {
	c.mu.Lock()
	c.life, c.idle = nil, idle
	c.mu.Unlock()
	if c.ahead != nil {
		_ = c.nc.SetReadDeadline(time.Unix(1, 0))
		<-c.ahead
		c.ahead = nil
	}
}

// hungUp is called when the client has ended its side.
func (c *wireServerConn) hungUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	if c.life != nil && !guard.HangUp.Off() {
		c.life.end(errClientGone)
	}
}

// linger ends our side and takes in what is still on its way, for a bounded time.
func (c *wireServerConn) linger() {
	if cw, ok := c.nc.(interface{ CloseWrite() error }); ok && cw.CloseWrite() != nil {
		return
	}
	_ = c.nc.SetReadDeadline(time.Now().Add(lingerTime))
	pb := smallPieces.Get().(*[]byte)
	defer smallPieces.Put(pb)
	for n := 0; n < lingerBytes; {
		m, err := c.nc.Read(*pb)
		if n += m; err != nil {
			return
		}
	}
}

// wireRequestBody reads the request's payload.
type wireRequestBody struct {
	c      *wireServerConn
	frame  h1.Framing
	left   int64
	chunks h1.Chunks
	ask    bool // the client waits for 100 (Continue)
	done   bool
	err    error
	pace   pace
}

// Read returns what one read from the connection brings, framing taken out.
func (b *wireRequestBody) Read(p []byte) (int, error) {
	if b.ask {
		b.ask = false
		if _, err := b.c.nc.Write([]byte("HTTP/1.1 100 Continue\r\n\r\n")); err != nil {
			b.err = err
		}
	}
	for {
		switch {
		case b.done:
			return 0, io.EOF
		case b.err != nil:
			return 0, b.err
		}
		n, err := b.raw(p)
		b.pace.n += int64(n)
		if n == 0 && err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			b.err = err
			return 0, err
		}
		if n, err = b.payload(p[:n]); err != nil {
			b.err = err
			b.c.down.close = true
		}
		if b.done {
			b.c.listen()
		}
		if n > 0 {
			return n, nil
		}
	}
}

func (b *wireRequestBody) raw(p []byte) (int, error) {
	c := b.c
	if !b.frame.Chunked && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	if c.w == c.r {
		if d, set := b.pace.next(time.Now()); set {
			c.due = time.Time{}
			_ = c.nc.SetReadDeadline(d)
		}
		if !b.frame.Chunked {
			return c.nc.Read(p) // no byte of the next request can be in it
		}
		if err := c.more(c.nc); err != nil {
			return 0, err
		}
	}
	return c.take(p), nil
}

// payload moves the payload in p to its beginning and says how much there is. Bytes behind a chunked body's end go
// back: they are the next request.
func (b *wireRequestBody) payload(p []byte) (int, error) {
	if !b.frame.Chunked {
		b.left -= int64(len(p))
		b.done = b.left == 0
		return len(p), nil
	}
	n := 0
	for rest := p; len(rest) > 0; {
		data, used, err := b.chunks.Next(rest)
		if err != nil {
			return n, err
		}
		n += copy(p[n:], data)
		if rest = rest[used:]; b.chunks.Done() {
			b.done = true
			b.c.putBack(rest)
			break
		}
	}
	return n, nil
}
