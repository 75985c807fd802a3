package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/grapevine-lb/grapevine/proxy/h1"
)

// wireUpstream sends HTTP/1.1 requests over connections of its own: head and body in one write, the answer's head
// parsed where it lies, its framing walked. What is not HTTP/1.1 (gRPC) goes by net/http.
type wireUpstream struct {
	dial func(context.Context) (net.Conn, error)
	life time.Duration // of an idle connection
	std  *netUpstream

	mu    sync.Mutex
	spare []*wireConn // idle, newest last

	record atomic.Pointer[string] // the newest load record that came with an answer
}

// upstream is an Upstream with its kept connections.
type upstream interface {
	Upstream
	sweep(now time.Time) // closes connections that have been idle too long
	dropIdle()           // closes all idle connections
	close()
}

// newUpstream makes the way to one place over connections that connect opens; secure means that they are TLS.
func newUpstream(cfg *Config, connect connector, host string, secure bool, idle time.Duration) upstream {
	n := newNetUpstream(connect, host, secure, idle)
	if cfg.std {
		return n
	}
	dial := func(ctx context.Context) (net.Conn, error) { return connect(ctx, "http/1.1") }
	return &wireUpstream{dial: dial, life: idle, std: n}
}

// wireConn is one connection to an engine or an agent; one exchange at a time owns it.
type wireConn struct {
	nc    net.Conn
	up    *wireUpstream
	used  bool      // it has served a request
	since time.Time // idle since

	headBuf
	resp  *h1.Response // the head that is being read
	reply *wireReply   // of the exchange under way, until its head is whole
	came  time.Time    // when that was
	vec   net.Buffers
}

// responses are heads that are being read.
var responses = sync.Pool{New: func() any { return new(h1.Response) }}

// outPieces are what is put together for one write.
var outPieces = sync.Pool{New: func() any { b := make([]byte, 0, headPiece); return &b }}

// oneWrite is up to which size head and body are put together in one buffer; larger bodies go by writev.
const oneWrite = 16 << 10

// writeAside is from which size on a write of a body that has to wait goes on in a goroutine of its own, since an engine may
// answer before it has read all of it.
const writeAside = 256 << 10

// get returns an idle connection, or a new one. The newest is taken, so that a pool larger than the load shrinks. That an
// idle one is still good shows when it is written to.
func (u *wireUpstream) get(ctx context.Context, now time.Time) (*wireConn, error) {
	for {
		u.mu.Lock()
		n := len(u.spare)
		if n == 0 {
			u.mu.Unlock()
			break
		}
		c := u.spare[n-1]
		u.spare[n-1] = nil
		u.spare = u.spare[:n-1]
		u.mu.Unlock()
		if now.Sub(c.since) < u.life && c.comeBack() == nil {
			return c, nil
		}
		_ = c.nc.Close() // idle, so nothing is lost
	}
	nc, err := u.connect(ctx)
	if err != nil {
		return nil, err
	}
	return &wireConn{nc: fastConn(nc), up: u}, nil
}

// comeBack undoes what a stream that the set has read may have left.
func (c *wireConn) comeBack() error {
	if s := sockOf(c.nc); s != nil {
		return s.comeBack()
	}
	return nil
}

// connect opens a connection on another goroutine: dialling goes deep, and a stack that has grown stays so for as long as
// the stream that it carries.
func (u *wireUpstream) connect(ctx context.Context) (net.Conn, error) {
	type dialled struct {
		nc  net.Conn
		err error
	}
	if l, ok := ctx.(*life); ok { // asked for its channel, it would keep that for as long as the stream
		c, cancel := context.WithCancelCause(context.Background())
		defer l.AfterFunc(func() { cancel(l.Err()) })()
		defer cancel(nil)
		ctx = c
	}
	ch := make(chan dialled, 1)
	go func() {
		nc, err := u.dial(ctx)
		ch <- dialled{nc, err}
	}()
	d := <-ch // dial ends with ctx
	return d.nc, d.err
}

// put keeps a connection whose answer ended cleanly.
func (u *wireUpstream) put(c *wireConn, now time.Time) {
	c.used, c.since = true, now
	u.mu.Lock()
	u.spare = append(u.spare, c)
	u.mu.Unlock()
}

// sweep closes connections that have been idle too long.
func (u *wireUpstream) sweep(now time.Time) { u.closeOlder(now.Add(-u.life)) }

// dropIdle closes all idle connections: one of them was dead, so the others may be too.
func (u *wireUpstream) dropIdle() { u.closeOlder(time.Now()) }

func (u *wireUpstream) close() {
	u.dropIdle()
	u.std.close()
}

// closeOlder closes the connections that have been idle since before t; the oldest stand first.
func (u *wireUpstream) closeOlder(t time.Time) {
	u.mu.Lock()
	n := 0
	for n < len(u.spare) && !u.spare[n].since.After(t) {
		n++
	}
	old := append([]*wireConn(nil), u.spare[:n]...)
	u.spare = append(u.spare[:0], u.spare[n:]...)
	u.mu.Unlock()
	for _, c := range old {
		_ = c.nc.Close()
	}
}

// Send implements Upstream.
func (u *wireUpstream) Send(ctx context.Context, r *Outgoing) (*Answer, error) {
	if r.HTTP2 {
		return u.std.Send(ctx, r)
	}
	var (
		c     *wireConn
		hold  holder
		aside <-chan struct{}
		err   error
		now   = r.Now
	)
	if now.IsZero() {
		now = time.Now()
	}
	fail := func(stage Stage, err error) (*Answer, error) {
		hold.release()
		_ = c.nc.Close()
		return nil, &SendError{Stage: stage, Reused: c.used, Err: err}
	}
	for {
		if c, err = u.get(ctx, now); err != nil {
			closeBody(r)
			return nil, &SendError{Stage: StageDial, Err: err}
		}
		hold = closeAtEnd(ctx, underTLS(c.nc)) // ends the read or write under way
		if aside, err = c.write(r); err != errStale {
			break
		}
		hold.release()
		_ = c.nc.Close() // idle, so nothing is lost
	}
	if err != nil && peekConn(c.nc) != waitData {
		// An engine that refuses a large body may have answered and closed; only without an answer is it lost.
		return fail(StageNoReply, err)
	}
	c.resp = responses.Get().(*h1.Response)
	if err := c.readHead(r.Method, r.Interim); err != nil {
		if c.w > 0 {
			return fail(StageHead, err)
		}
		return fail(StageNoReply, err)
	}
	a := c.reply
	c.reply = nil
	c.answer(a)
	if a.Head.Status == 101 {
		if r.Upgrade == "" {
			return fail(StageHead, errors.New("101 that nobody asked for"))
		}
		if !hold.release() {
			return fail(StageHead, context.Cause(ctx))
		}
		a.Tunnel = &wireTunnel{Conn: c.nc, c: c}
		return &a.Answer, nil
	}
	// The body is a value of its own, not a part of the connection: at its end the connection goes back and may serve
	// another exchange at once, while this one still asks for the end, the trailer and Close.
	b := &a.body
	*b = wireBody{c: c, reply: a, hold: hold, aside: aside, frame: c.resp.Framing, left: c.resp.Length, last: c.resp.Close, came: c.came}
	b.done = c.resp.Framing == h1.Framing{}
	a.Body = b
	responses.Put(c.resp)
	c.resp = nil
	if b.done {
		b.end()
	}
	return &a.Answer, nil
}

// errStale means that a kept connection had ended, or that something waits on it; nothing was sent.
var errStale = errors.New("the kept connection has ended")

// write sends the request. A body that is all here goes with the head; what the connection does not take at once of a large one, and
// one that is still to come, is written by a goroutine, whose end is told by the channel.
func (c *wireConn) write(r *Outgoing) (aside <-chan struct{}, err error) {
	s, asks := c.nc.(*sock)
	kept, whole := r.Body.(*bodyReader)
	whole = r.Body == nil || whole && r.Length >= 0 && kept.b.complete()
	asks = asks && whole
	if c.used && !asks && !quiet(c.nc) {
		return nil, errStale
	}
	pb := outPieces.Get().(*[]byte)
	b := appendRequestHead((*pb)[:0], r)
	defer func() {
		if cap(b) <= oneWrite {
			*pb = b[:0]
		}
		outPieces.Put(pb)
	}()
	var send func() error
	if whole {
		var blocks [][]byte
		if r.Body != nil {
			blocks = kept.b.blocks
		}
		if !asks && len(b)+int(r.Length) <= oneWrite {
			for _, blk := range blocks {
				b = append(b, blk...)
			}
			blocks = nil
		}
		left := append(append(c.vec[:0], b), blocks...)
		c.vec = left
		if asks {
			var fresh bool
			if left, fresh, err = s.ask(left, c.used); !fresh {
				return nil, errStale
			}
		}
		if err == nil && len(left) > 0 && r.Length <= writeAside {
			left, err = nil, writeVec(c.nc, left)
		}
		if err != nil || len(left) == 0 {
			clear(c.vec)
			closeBody(r)
			return nil, err
		}
		if len(left) == len(c.vec) {
			left[0] = slices.Clone(left[0]) // the head's memory is used again
		}
		rest := left
		send = func() error { // nobody else closes the body, so the blocks stay
			defer clear(c.vec)
			return writeVec(c.nc, rest)
		}
	} else {
		head, body, length := slices.Clone(b), r.Body, r.Length // r is used again when the attempt is over
		send = func() error { return c.writeBody(head, body, length) }
	}
	done, body := make(chan struct{}), r.Body
	go func() {
		defer close(done)
		defer body.Close()
		if send() != nil {
			// What was announced did not come: the engine must not wait for the rest of it. Reads go on, for an
			// early answer.
			if cw, ok := c.nc.(interface{ CloseWrite() error }); ok {
				_ = cw.CloseWrite()
			}
		}
	}()
	return done, nil
}

func (c *wireConn) writeBody(head []byte, body io.Reader, length int64) error {
	pb := largePieces.Get().(*[]byte)
	defer largePieces.Put(pb)
	out := head
	for {
		n, err := body.Read((*pb)[:largePiece-16])
		if n > 0 {
			if length < 0 {
				out = h1.AppendChunk(out, (*pb)[:n])
			} else {
				out = append(out, (*pb)[:n]...)
				length -= int64(n)
			}
		}
		if err == io.EOF && length < 0 {
			out = append(out, h1.LastChunk...)
		}
		if len(out) > 0 {
			if _, werr := c.nc.Write(out); werr != nil {
				return werr
			}
			out = out[:0]
		}
		switch {
		case err == io.EOF && length > 0:
			return io.ErrUnexpectedEOF
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// appendRequestHead writes the request line and the fields.
func appendRequestHead(b []byte, r *Outgoing) []byte {
	b = append(b, r.Method...)
	b = append(b, ' ')
	b = append(b, r.Target...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, r.Host...)
	b = append(b, '\r', '\n')
	b = appendFields(b, r.Header)
	switch {
	case r.Upgrade != "":
		b = append(b, "Connection: Upgrade\r\nUpgrade: "...)
		b = append(b, r.Upgrade...)
		b = append(b, '\r', '\n')
	case r.Body == nil:
		if r.Method == "POST" || r.Method == "PUT" || r.Method == "PATCH" {
			b = append(b, "Content-Length: 0\r\n"...)
		}
	case r.Length < 0:
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	default:
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, r.Length, 10)
		b = append(b, '\r', '\n')
	}
	return append(b, '\r', '\n')
}

// appendFields writes fields. Their parts were checked when they were read, or are our own.
func appendFields(b []byte, h Header) []byte {
	for i := range h {
		b = append(b, h[i].Name...)
		b = append(b, ':', ' ')
		b = append(b, h[i].Value...)
		b = append(b, '\r', '\n')
	}
	return b
}

// maxInterims is how many interim answers may stand before an answer: one in ten seconds, for half an hour.
const maxInterims = 180

var errInterims = errors.New("too many interim answers")

// readHead reads until the answer's head is whole, interim answers but 101 left behind.
func (c *wireConn) readHead(method string, interim func(Header)) error {
	for passed := 0; ; {
		if c.buf != nil && c.w > c.r {
			n, err := h1.ParseResponse((*c.buf)[c.r:c.w], c.resp, unsafeBytes(method))
			if err != nil {
				return err
			}
			if n > 0 {
				if c.resp.Status >= 200 || c.resp.Status == 101 {
					c.came = time.Now()
					c.keepHead(n)
					return nil
				}
				if passed++; passed > maxInterims {
					return errInterims
				}
				if interim != nil && c.resp.Status > 101 {
					interim(c.interim())
				}
				c.r += n
				continue
			}
		}
		if err := c.more(c.nc); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
}

// interim makes the core's form of an interim head's fields; they are copies.
func (c *wireConn) interim() Header {
	h := make(Header, 0, len(c.resp.Fields))
	for _, f := range c.resp.Fields {
		h = append(h, Field{string(f.Name), string(f.Value)})
	}
	return h
}

// wireReply is an answer with all its memory, which serves one exchange after another.
type wireReply struct {
	Answer
	body wireBody
	head *wireHead

	trailer func() Header // methods, made once
	recycle func()
}

var wireReplies sync.Pool

func newWireReply() *wireReply {
	if a, ok := wireReplies.Get().(*wireReply); ok {
		return a
	}
	a := new(wireReply)
	a.trailer = a.body.trailer
	a.recycle = func() {
		a.dropHead()
		a.Answer, a.body = Answer{}, wireBody{}
		wireReplies.Put(a)
	}
	return a
}

// dropHead gives the head's memory back.
func (a *wireReply) dropHead() {
	if a.head != nil {
		a.head.rest()
		a.head = nil
	}
}

// keepHead moves the head into memory of its own, so that the fields outlive the buffer, and parses it there.
func (c *wireConn) keepHead(n int) {
	c.reply = newWireReply()
	c.reply.head = wireHeads.Get().(*wireHead)
	own := append(c.reply.head.mem[:0], (*c.buf)[c.r:c.r+n]...)
	c.reply.head.mem = own
	c.r += n
	for i := range c.resp.Fields {
		f := &c.resp.Fields[i]
		f.Name, f.Value = moved(own, *c.buf, c.r-n, f.Name), moved(own, *c.buf, c.r-n, f.Value)
	}
	c.resp.Upgrade, c.resp.ContentType, c.resp.Reason = nil, nil, nil
	c.dropEmpty()
}

// moved is the part of own that has the place that b has in the head at buf[start:].
func moved(own, buf []byte, start int, b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))-uintptr(unsafe.Pointer(unsafe.SliceData(buf)))) - start
	return own[off : off+len(b)]
}

// answer makes the core's form of the head; the strings lie in the memory that keepHead made.
func (c *wireConn) answer(a *wireReply) {
	h := slices.Grow(a.head.fields[:0], len(c.resp.Fields)+4)
	for i, f := range c.resp.Fields {
		if c.resp.Framed.Has(i) || c.resp.IsHop(i) {
			continue
		}
		h = append(h, Field{unsafeString(f.Name), unsafeString(f.Value)})
	}
	a.head.fields = h
	a.Answer = Answer{Head: ResponseHead{Status: c.resp.Status, Header: h, Length: c.resp.Length}, Trailer: a.trailer, Recycle: a.recycle}
	if c.resp.Length == 0 && !c.resp.Chunked {
		a.Head.Length = c.declared()
	}
}

// declared is the length that an answer without a body names (to HEAD, with 304), or 0.
func (c *wireConn) declared() int64 {
	for _, f := range c.resp.Fields {
		if h1.Lookup(f.Name) == h1.ContentLength {
			n, _ := strconv.ParseInt(string(f.Value), 10, 64)
			return n
		}
	}
	if c.resp.Status == 204 || c.resp.Status == 304 || c.resp.Status < 200 {
		return 0
	}
	return -1
}

// wireBody reads an answer's payload. It owns its connection until end.
type wireBody struct {
	c      *wireConn
	reply  *wireReply // of which it is a part
	hold   holder
	aside  <-chan struct{}
	frame  h1.Framing
	left   int64
	chunks h1.Chunks
	last   bool // no other answer follows on the connection
	done   bool // the end has been read
	closed bool
	came   time.Time // the head, if all that was read has come with it; zero = look
}

// now is the clock as it was when the newest bytes came.
func (b *wireBody) now() time.Time {
	if b.came.IsZero() {
		return time.Now()
	}
	return b.came
}

// Read returns what one read from the connection brings. A chunked body's framing is taken out in place.
func (b *wireBody) Read(p []byte) (int, error) {
	for {
		if b.done {
			return 0, io.EOF
		}
		if b.closed {
			return 0, net.ErrClosed
		}
		n, err := b.raw(p)
		if n > 0 {
			n, err = b.payload(p[:n])
			if err != nil {
				b.Close()
				return n, err
			}
			if b.done {
				b.end()
			}
			if n > 0 {
				return n, nil
			}
			continue
		}
		b.fail(err)
		if err == io.EOF && !b.done {
			err = io.ErrUnexpectedEOF
		}
		return 0, err
	}
}

// lend reads like Read, into memory that it takes from the pool when there is something to read: a stream that is silent
// holds none. The caller puts it back; with an error there may be none.
func (b *wireBody) lend(pool *sync.Pool) (p *[]byte, n int, err error) {
	if b.done || b.closed { // the connection may serve another exchange already
		n, err = b.Read(nil)
		return nil, n, err
	}
	s, ok := b.c.nc.(*sock)
	if !ok || b.c.buf != nil {
		p = pool.Get().(*[]byte)
		n, err = b.Read(*p)
		return p, n, err
	}
	b.came = time.Time{}
	for {
		most := -1
		if b.frame.Length >= 0 {
			most = int(min(b.left, largePiece))
		}
		p, n, err = s.lend(pool, most)
		if n == 0 {
			b.fail(err)
			if err == io.EOF && !b.done {
				err = io.ErrUnexpectedEOF
			}
			return p, 0, err
		}
		if n, err = b.payload((*p)[:n]); err != nil {
			b.Close()
			return p, n, err
		}
		if b.done {
			b.end()
			if n == 0 {
				return p, 0, io.EOF
			}
		}
		if n > 0 {
			return p, n, nil
		}
		pool.Put(p)
	}
}

// fail ends the body after a read that brought err instead of data.
func (b *wireBody) fail(err error) {
	if err == io.EOF && b.frame.ToEnd {
		b.done = true
		b.end()
		return
	}
	b.Close()
}

// raw takes what was read ahead, or reads.
func (b *wireBody) raw(p []byte) (int, error) {
	c := b.c
	if b.frame.Length >= 0 && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	if c.buf != nil {
		return c.take(p), nil
	}
	b.came = time.Time{}
	return c.nc.Read(p)
}

// betweenChunks reports whether the next byte begins a chunk.
func (b *wireBody) betweenChunks() bool { return b.frame.Chunked && b.chunks.AtBoundary() }

// payload moves the payload in p to its beginning and says how much there is.
func (b *wireBody) payload(p []byte) (int, error) {
	switch {
	case b.frame.ToEnd:
		return len(p), nil
	case !b.frame.Chunked:
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
		rest = rest[used:]
		if b.chunks.Done() {
			b.done = true
			if len(rest) > 0 {
				b.frame.ToEnd = true // bytes behind the answer: the connection cannot be used again
			}
			break
		}
	}
	return n, nil
}

// sent reports whether the request is out: an engine may answer before it has read all of a large body, and who writes that
// has the connection too.
func (b *wireBody) sent() bool {
	if b.aside == nil {
		return true
	}
	select {
	case <-b.aside:
		return true
	default:
		return false
	}
}

// end gives the connection back if it is clean, or closes it.
func (b *wireBody) end() {
	if b.closed {
		return
	}
	b.closed = true
	c := b.c
	free := b.hold.release()
	if !b.sent() { // the engine answered without having read the request
		free = false
	}
	if !free || b.frame.ToEnd || b.last || c.buf != nil {
		_ = c.nc.Close()
		return
	}
	c.up.put(c, b.now())
}

// Close ends the exchange; before the end of the answer it ends the connection too.
func (b *wireBody) Close() error {
	if b.closed {
		return nil
	}
	b.closed = true
	b.hold.release()
	return b.c.nc.Close()
}

func (b *wireBody) trailer() Header {
	var h Header
	for _, f := range b.chunks.Trailer() {
		h = append(h, Field{string(f.Name), string(f.Value)})
	}
	return h
}

// wireTunnel is the connection after 101, with what was read ahead.
type wireTunnel struct {
	net.Conn
	c *wireConn
}

// Read gives the early bytes first (C40).
func (t *wireTunnel) Read(p []byte) (int, error) {
	if c := t.c; c.buf != nil {
		return c.take(p), nil
	}
	return t.Conn.Read(p)
}

// CloseWrite passes a half close on.
func (t *wireTunnel) CloseWrite() error {
	if cw, ok := t.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return nil
}

func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
func unsafeBytes(s string) []byte  { return unsafe.Slice(unsafe.StringData(s), len(s)) }
