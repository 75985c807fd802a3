package link

import (
	"bufio"
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

// Errors of a question that got no answer.
var (
	ErrClosed  = errors.New("link closed")
	ErrTimeout = errors.New("no answer over the link in time")
)

// Client asks one peer.
type Client struct {
	// Dial opens a connection that has been upgraded to Protocol.
	Dial func(context.Context) (net.Conn, error)
	// Idle is how long a connection without questions stays (0 = 60 s).
	Idle time.Duration

	mu      sync.Mutex
	conn    *conn
	dialing chan struct{} // closed when the dial under way has ended
	failed  time.Time     // when the last dial failed
	lastErr error
	closed  bool
	spare   *question // not a sync.Pool: a channel must stay in its synctest bubble
	wg      sync.WaitGroup
}

func (c *Client) question() *question {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := c.spare
	if q == nil {
		return &question{done: make(chan struct{}, 1)}
	}
	c.spare = q.next
	return q
}

func (c *Client) release(q *question) {
	q.reply = nil
	c.mu.Lock()
	defer c.mu.Unlock()
	q.next, c.spare = c.spare, q
}

// redial is the pause after a failed dial, so that a peer that refuses is not
// asked for every request.
const redial = 250 * time.Millisecond

// conn is one open connection and its questions under way.
type conn struct {
	nc      net.Conn
	mu      sync.Mutex
	out     []byte
	nextID  uint64
	waiting map[uint64]*question
	err     error
	used    time.Time
	sweep   *time.Timer // closes the connection when it has been idle
}

// question is one call's place to be answered.
type question struct {
	kind  byte
	done  chan struct{} // capacity 1
	reply []byte
	err   error
	out   chan<- Result // of Go; nil = of Call
	index int
	at    time.Time
	next  *question // in the client's list of spare ones
}

// answer delivers what came, or the error.
func (q *question) answer() {
	if q.out != nil {
		q.out <- Result{Index: q.index, Reply: q.reply, Err: q.err, Took: time.Since(q.at)}
		return
	}
	q.done <- struct{}{}
}

// Result is the answer to a question put by Go.
type Result struct {
	Index int // what Go was given
	Reply []byte
	Err   error
	Took  time.Duration // from the question's writing to the answer's arrival
}

// Go asks without waiting for the answer, so that many peers are asked at once by one goroutine. The result goes to out,
// which must have room for it. forget takes the question back if its answer has not come; it must be called, or the
// question stays until the connection ends. Without an open connection one is dialled aside.
func (c *Client) Go(deadline time.Time, kind byte, payload []byte, index int, out chan<- Result) (forget func()) {
	c.mu.Lock()
	cn, closed := c.conn, c.closed
	c.mu.Unlock()
	switch {
	case closed:
		out <- Result{Index: index, Err: ErrClosed}
		return func() {}
	case cn == nil:
		ctx, cancel := context.WithCancelCause(context.Background())
		own := append([]byte(nil), payload...)
		go func() { // ends with the deadline at the latest
			at := time.Now()
			reply, err := c.Call(ctx, deadline, kind, own, nil)
			out <- Result{Index: index, Reply: reply, Err: err, Took: time.Since(at)}
		}()
		return func() { cancel(ErrTimeout) }
	}
	q := &question{kind: kind, out: out, index: index, at: time.Now()}
	id, err := cn.ask(q, kind, payload, deadline)
	if err != nil {
		c.drop(cn)
		out <- Result{Index: index, Err: err}
		return func() {}
	}
	return func() { cn.forget(id) }
}

// Open reports whether a connection is open.
func (c *Client) Open() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn != nil
}

// Call asks and waits for the answer until the deadline or ctx's end. The
// answer is appended to reply. It fails with ErrTimeout, ErrClosed, ctx's
// cause, or what the dial said.
func (c *Client) Call(ctx context.Context, deadline time.Time, kind byte, payload, reply []byte) ([]byte, error) {
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	cn, err := c.connect(ctx, timer.C)
	if err != nil {
		return reply, err
	}
	q := c.question()
	q.kind, q.reply, q.err = kind, reply, nil
	id, err := cn.ask(q, kind, payload, deadline)
	if err != nil {
		c.drop(cn)
		c.release(q)
		return reply, err
	}
	select {
	case <-q.done:
	case <-timer.C:
		err = ErrTimeout
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil && cn.forget(id) {
		c.release(q)
		return reply, err
	}
	if err != nil {
		<-q.done // the answer came in between
	}
	reply, err = q.reply, q.err
	c.release(q)
	return reply, err
}

// connect returns the open connection, dialling one if there is none. The dial
// is not tied to the question that started it: a slow handshake serves the next.
func (c *Client) connect(ctx context.Context, timeout <-chan time.Time) (*conn, error) {
	for {
		c.mu.Lock()
		switch {
		case c.closed:
			c.mu.Unlock()
			return nil, ErrClosed
		case c.conn != nil:
			cn := c.conn
			c.mu.Unlock()
			return cn, nil
		case c.dialing == nil && time.Since(c.failed) < redial && !c.failed.IsZero():
			err := c.lastErr
			c.mu.Unlock()
			return nil, err
		case c.dialing == nil:
			c.dialing = make(chan struct{})
			c.wg.Go(c.dial)
		}
		wait := c.dialing
		c.mu.Unlock()
		select {
		case <-wait:
		case <-timeout:
			return nil, ErrTimeout
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (c *Client) dial() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	nc, err := c.Dial(ctx)
	cancel()
	c.mu.Lock()
	close(c.dialing)
	c.dialing = nil
	if err != nil {
		c.failed, c.lastErr = time.Now(), err
		c.mu.Unlock()
		return
	}
	if c.closed {
		c.mu.Unlock()
		nc.Close()
		return
	}
	c.failed = time.Time{}
	cn := &conn{nc: nc, waiting: make(map[uint64]*question), used: time.Now()}
	c.conn = cn
	c.mu.Unlock()
	c.read(cn)
}

// read delivers answers until the connection ends or has been idle.
func (c *Client) read(cn *conn) {
	idle := c.Idle
	if idle == 0 {
		idle = time.Minute
	}
	// One timer a connection: a deadline on the socket for each question
	// would cost more than the question.
	cn.mu.Lock()
	cn.sweep = time.AfterFunc(idle, func() {
		if rest := idle - cn.idleFor(); rest > 0 {
			cn.sweep.Reset(rest)
			return
		}
		c.drop(cn)
	})
	cn.mu.Unlock()
	defer cn.sweep.Stop()
	defer c.drop(cn)
	r := bufio.NewReaderSize(cn.nc, 4096)
	var buf []byte
	for {
		kind, id, payload, next, err := readFrame(r, buf)
		buf = next
		if err != nil {
			return
		}
		if q := cn.take(id); q != nil {
			if kind == q.kind|answerBit {
				q.reply = append(q.reply, payload...)
			} else {
				q.err = ErrFrame
			}
			q.answer()
		}
	}
}

// drop closes a connection and fails its questions. It may be called twice.
func (c *Client) drop(cn *conn) {
	c.mu.Lock()
	if c.conn == cn {
		c.conn = nil
	}
	c.mu.Unlock()
	cn.nc.Close()
	cn.mu.Lock()
	defer cn.mu.Unlock()
	cn.err = ErrClosed
	for id, q := range cn.waiting {
		delete(cn.waiting, id)
		q.err = ErrClosed
		q.answer()
	}
}

// Close ends the connection, fails what is under way and waits for the
// goroutines of the client to end.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	cn := c.conn
	c.mu.Unlock()
	if cn != nil {
		c.drop(cn)
	}
	c.wg.Wait()
}

// ask writes a question. One write a question: a frame is small, and a
// question that waits for others to share its packet is late.
func (cn *conn) ask(q *question, kind byte, payload []byte, deadline time.Time) (uint64, error) {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if cn.err != nil {
		return 0, cn.err
	}
	cn.nextID++
	id := cn.nextID
	cn.used = time.Now()
	cn.out = appendFrame(cn.out[:0], kind, id, payload)
	cn.nc.SetWriteDeadline(deadline)
	if _, err := cn.nc.Write(cn.out); err != nil {
		return 0, ErrClosed
	}
	cn.waiting[id] = q
	return id, nil
}

func (cn *conn) take(id uint64) *question {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	q := cn.waiting[id]
	delete(cn.waiting, id)
	return q
}

func (cn *conn) forget(id uint64) bool { return cn.take(id) != nil }

func (cn *conn) idleFor() time.Duration {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	return time.Since(cn.used)
}
