package otlp

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"
	resource "go.opentelemetry.io/proto/slim/otlp/resource/v1"
	"google.golang.org/protobuf/proto"

	"github.com/grapevine-lb/grapevine/proxy/span"
)

const (
	repeatFor   = 30 * time.Second // from the first post of a batch; then it is given up
	repeatLeast = 500 * time.Millisecond
	repeatMost  = 5 * time.Second
	flushFor    = 2 * time.Second // for what is left at the end
	maxReply    = 64 << 10        // bytes that are read of an answer
)

// Exporter sends traces in batches.
type Exporter struct {
	cfg     Config
	version string
	res     *resource.Resource
	client  *http.Client
	problem func(error) // called when a batch is given up (err) and when one went through (nil)

	mu    sync.Mutex
	queue []*span.Trace
	spans int // in queue
	full  chan struct{}

	sent, dropped, failed, rejected atomic.Uint64
}

// Stats counts spans since the start.
type Stats struct {
	Sent     uint64 // taken by the collector
	Dropped  uint64 // the queue was full
	Failed   uint64 // the collector could not be reached, or did not take them
	Rejected uint64 // the collector took the post and not these
}

// New makes an exporter. own describes the agent, as far as the variables do not; problem is told how posts go, by the
// goroutine of Run.
func New(c Config, version string, own []span.Attr, dial func(context.Context, string, string) (net.Conn, error), problem func(error)) *Exporter {
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dial, TLSClientConfig: c.TLS, MaxIdleConnsPerHost: 1,
		IdleConnTimeout: 30 * time.Second, ForceAttemptHTTP2: dial == nil}
	if dial == nil {
		t.DialContext = (&net.Dialer{Timeout: 5 * time.Second}).DialContext
	}
	return &Exporter{cfg: c, version: version, res: resourceOf(&c, own), problem: problem, full: make(chan struct{}, 1),
		client: &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

// Sample reports whether a request is recorded.
func (e *Exporter) Sample(id span.TraceID, parent span.Context) bool {
	return e.cfg.Sampler.Sample(id, parent)
}

// Export takes a trace for sending; it is dropped if too many wait.
func (e *Exporter) Export(t *span.Trace) {
	n := len(t.Spans)
	e.mu.Lock()
	if e.spans+n > e.cfg.QueueSize {
		e.mu.Unlock()
		e.dropped.Add(uint64(n))
		return
	}
	e.queue = append(e.queue, t)
	e.spans += n
	full := e.spans >= e.cfg.BatchSize
	e.mu.Unlock()
	if full {
		select {
		case e.full <- struct{}{}:
		default:
		}
	}
}

// Stats returns the counts.
func (e *Exporter) Stats() Stats {
	return Stats{Sent: e.sent.Load(), Dropped: e.dropped.Load(), Failed: e.failed.Load(), Rejected: e.rejected.Load()}
}

// Run sends until ctx ends; then it sends what is left, once and for at most two seconds.
func (e *Exporter) Run(ctx context.Context) error {
	defer e.client.CloseIdleConnections()
	tick := time.NewTicker(e.cfg.Delay)
	defer tick.Stop()
	for {
		least := 1
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushFor)
			defer cancel()
			for e.sendOne(last, 1, false) {
			}
			return nil
		case <-tick.C:
		case <-e.full:
			least = e.cfg.BatchSize
		}
		for ctx.Err() == nil && e.sendOne(ctx, least, true) {
			least = e.cfg.BatchSize // the rest of a batch waits for the next time
		}
	}
}

// take takes the oldest traces, as many as make a batch; none if they have fewer spans than least.
func (e *Exporter) take(least int) (batch []*span.Trace, spans int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spans < least {
		return nil, 0
	}
	n := 0
	for n < len(e.queue) && (n == 0 || spans+len(e.queue[n].Spans) <= e.cfg.BatchSize) {
		spans += len(e.queue[n].Spans)
		n++
	}
	batch = append(batch, e.queue[:n]...)
	rest := copy(e.queue, e.queue[n:])
	clear(e.queue[rest:])
	e.queue = e.queue[:rest]
	e.spans -= spans
	return batch, spans
}

// sendOne sends one batch and reports whether there was one. repeat: what may help later is tried again.
func (e *Exporter) sendOne(ctx context.Context, least int, repeat bool) bool {
	batch, n := e.take(least)
	if len(batch) == 0 {
		return false
	}
	body, err := e.body(batch)
	if err != nil { // a mistake of ours
		e.failed.Add(uint64(n))
		e.problem(err)
		return true
	}
	began, pause := time.Now(), repeatLeast
	for {
		rejected, after, err := e.post(ctx, body)
		if err == nil {
			e.rejected.Add(rejected)
			e.sent.Add(uint64(n) - min(rejected, uint64(n)))
			e.problem(nil)
			return true
		}
		wait := cmp.Or(after, time.Duration(float64(pause)*(0.5+rand.Float64())))
		if pause = min(2*pause, repeatMost); !repeat || !again(err) || time.Since(began)+wait > repeatFor {
			e.failed.Add(uint64(n))
			e.problem(err)
			return true
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done(): // the end: once more, quickly
			t.Stop()
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushFor)
			defer cancel()
			ctx, repeat = last, false
		}
	}
}

// statusError is an answer that is none of 200.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("the collector answered %d", int(s)) }

// again reports whether the same post may succeed later.
func again(err error) bool {
	if s, ok := errors.AsType[statusError](err); ok {
		return s == 429 || s == 502 || s == 503 || s == 504
	}
	return true // not reached, or cut off
}

func (e *Exporter) body(batch []*span.Trace) ([]byte, error) {
	b, err := proto.Marshal(request(e.res, e.version, batch))
	if err != nil || !e.cfg.Gzip {
		return b, err
	}
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write(b) // never fails into a buffer
	_ = w.Close()
	return z.Bytes(), nil
}

// post sends one body. after is how long the collector asks to wait.
func (e *Exporter) post(ctx context.Context, body []byte) (rejected uint64, after time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.cfg.URL, bytes.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	for k, v := range e.cfg.Headers {
		req.Header[k] = v
	}
	req.Header.Set("Content-Type", "application/x-protobuf")
	req.Header.Set("User-Agent", "grapevine/"+e.version)
	if e.cfg.Gzip {
		req.Header.Set("Content-Encoding", "gzip")
	}
	res, err := e.client.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxReply))
	if res.StatusCode/100 != 2 {
		if n, err := strconv.Atoi(res.Header.Get("Retry-After")); err == nil && n > 0 {
			after = time.Duration(min(n, 3600)) * time.Second
		}
		return 0, after, statusError(res.StatusCode)
	}
	var reply collector.ExportTraceServiceResponse
	if err == nil && proto.Unmarshal(b, &reply) == nil { // one that cannot be read is of no matter: the spans were taken
		rejected = uint64(max(0, reply.GetPartialSuccess().GetRejectedSpans()))
	}
	return rejected, 0, nil
}
