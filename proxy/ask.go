package proxy

import (
	"encoding/binary"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/link"
	"github.com/grapevine-lb/grapevine/routing"
)

const (
	// askLimit is how long a request waits for the answers: simulated, asking pays up to 3 ms of round trip.
	askLimit = 5 * time.Millisecond
	// askMisses is after how many answers in a row that did not come a peer is left alone for askPause: one that hangs
	// must not cost every request the limit.
	askMisses = 3
	askPause  = time.Second
)

// askMetrics counts the questions put for requests.
type askMetrics struct {
	requests atomic.Uint64 // requests for which somebody was asked
	answered atomic.Uint64 // answers in time, refusals among them
	refused  atomic.Uint64 // answers that refuse
	missed   atomic.Uint64 // no answer in time, or no connection
	changed  atomic.Uint64 // requests that the answers sent elsewhere
	given    atomic.Uint64 // answers that we gave
	turned   atomic.Uint64 // requests whose target had become busier than it had said
	took     histogram     // what asking held a request
}

// askNote is what a pick's questions came to, for the record.
type askNote struct {
	asked, answered int // other replicas; answered counts our own too
	took            time.Duration
}

// askBounds are upper bounds of the histogram of what asking takes, in seconds.
var askBounds = []float64{0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.01}

// asker is what one request's questions need; it is kept for the next one.
type asker struct {
	payload []byte
	out     chan link.Result
	forget  [routing.MaxAsk]func()
	answers [routing.MaxAsk]routing.Answer
}

// askers are kept by each Proxy and not in a global pool: a channel must stay in its synctest bubble.
type askers struct{ pool sync.Pool }

func (s *askers) get() *asker {
	if a, ok := s.pool.Get().(*asker); ok {
		return a
	}
	return &asker{}
}

// appendScoreQuestion appends what a peer must know to say what the request would cost it:
//
//	class u8 · service u32 · prompt tokens u32 · most output tokens u32 · blocks u16 · blocks 6 bytes each
//
// A block is the low half of a chained prefix hash, as digests have them, and how many tokens are in it, u16: the highest bit
// stands for routing.FineBlock.
func appendScoreQuestion(b []byte, r *routing.Request) []byte {
	le := binary.LittleEndian
	b = append(b, r.Class)
	b = le.AppendUint32(b, uint32(r.Service))
	b = le.AppendUint32(b, uint32(r.PromptTokens))
	b = le.AppendUint32(b, uint32(r.MaxTokens))
	n := min(len(r.Prefix), math.MaxUint16)
	b = le.AppendUint16(b, uint16(n))
	last := 0
	for i, h := range r.Prefix[:n] {
		b = le.AppendUint32(b, uint32(h))
		tokens := routing.PrefixBlockTokens
		if i < len(r.Ends) {
			tokens, last = int(r.Ends[i])-last, int(r.Ends[i])
		}
		b = le.AppendUint16(b, uint16(h>>63)<<15|uint16(min(tokens, 1<<15-1)))
	}
	return b
}

// readScoreQuestion is the other way round; prefix and ends are room for the blocks.
func readScoreQuestion(b []byte, r *routing.Request, prefix []uint64, ends []uint32) bool {
	f := fields{b: b}
	*r = routing.Request{Class: f.u8(), Service: routing.Service(f.u32()), PromptTokens: int(f.u32()), MaxTokens: int(f.u32())}
	end := uint32(0)
	for n := int(f.u16()); n > 0 && !f.bad; n-- {
		h, tokens := uint64(f.u32()), f.u16()
		end += uint32(tokens &^ (1 << 15))
		prefix, ends = append(prefix, h|uint64(tokens>>15)*routing.FineBlock), append(ends, end)
	}
	r.Prefix, r.Ends = prefix, ends
	return !f.bad
}

const (
	scoreTaken   = 0
	scoreRefused = 1
	scoreAnswer  = 21 // bytes before the record
)

// answerScore answers from our own books:
//
//	0 = it would be taken, 1 = refused u8 · score f64 s · first token after f64 s · prompt tokens to compute u32 ·
//	our load record
func (p *Proxy) answerScore(payload, reply []byte) ([]byte, bool) {
	var r routing.Request
	var room [64]uint64
	var ends [64]uint32
	if !readScoreQuestion(payload, &r, room[:0], ends[:0]) {
		return reply, false
	}
	p.metrics.ask.given.Add(1)
	a := p.cfg.Table.Answer(&r, time.Now())
	state := byte(scoreTaken)
	if !a.OK || p.draining.Load() || !p.gate.takes(&r, time.Now()) {
		state = scoreRefused
	}
	reply = append(reply, state)
	reply = binary.LittleEndian.AppendUint64(reply, math.Float64bits(a.Score))
	reply = binary.LittleEndian.AppendUint64(reply, math.Float64bits(a.First))
	reply = binary.LittleEndian.AppendUint32(reply, uint32(a.Tokens))
	if p.cfg.Record != nil {
		reply = append(reply, p.cfg.Record()...)
	}
	return reply, true
}

// ask puts the decision's question to those it lists, all at once, waits at most askLimit, and decides anew. The records
// that come with the answers go into the table.
func (x *exchange) ask(d *routing.Decision) {
	p := x.p
	m := &p.metrics.ask
	start := time.Now()
	deadline := start.Add(askLimit)
	a := p.askers.get()
	defer p.askers.pool.Put(a)
	if cap(a.out) < routing.MaxAsk {
		a.out = make(chan link.Result, routing.MaxAsk)
	}
	a.payload = appendScoreQuestion(a.payload[:0], &x.req)
	answers, under := a.answers[:0], 0
	var peers [routing.MaxAsk]*asked
	for i, peer := range d.Asked() {
		if peer.Self() {
			own := p.cfg.Table.Answer(&x.req, start)
			own.Index, own.OK = i, own.OK && !p.draining.Load() && p.gate.takes(&x.req, start)
			answers = append(answers, own)
			continue
		}
		q := p.questions.to(peer)
		if q == nil || !q.worth(start) {
			continue
		}
		peers[i] = q
		a.forget[i] = q.client.Go(deadline, AskScore, a.payload, i, a.out)
		under++
	}
	if under == 0 {
		return
	}
	m.requests.Add(1)
	asked := under
	timer := time.NewTimer(askLimit)
	defer timer.Stop()
	late := false
	for under > 0 && !late {
		select {
		case r := <-a.out:
			under--
			if ans, ok := x.heard(peers[r.Index], d.Ask[r.Index], r, start); ok {
				answers = append(answers, ans)
			}
			peers[r.Index] = nil
		case <-timer.C:
			late = true
		case <-x.ctx.Done():
			late = true
		}
	}
	for i, q := range peers {
		if q != nil {
			a.forget[i]()
			if x.ctx.Err() == nil {
				m.missed.Add(1)
				q.miss(start)
			}
		}
		a.forget[i] = nil
	}
	if under > 0 {
		a.out = nil // an answer may still fall into it
	}
	took := time.Since(start)
	m.took.observe(took)
	x.askNote = askNote{asked: asked, answered: len(answers), took: took}
	x.trace.heard(d, answers)
	was := d.Peer
	if *d = routing.Settle(d, answers); d.Peer != was {
		m.changed.Add(1)
	}
}

// heard reads one answer. ok false: there is none.
func (x *exchange) heard(q *asked, peer *routing.Peer, r link.Result, at time.Time) (ans routing.Answer, ok bool) {
	m := &x.p.metrics.ask
	if r.Err != nil || len(r.Reply) < scoreAnswer {
		m.missed.Add(1)
		q.miss(at)
		return ans, false
	}
	f := fields{b: r.Reply}
	ans = routing.Answer{Index: r.Index, OK: f.u8() == scoreTaken, Score: math.Float64frombits(f.u64()), First: math.Float64frombits(f.u64()), Tokens: int(f.u32())}
	if len(f.b) > 0 && x.p.cfg.OnRecord != nil {
		x.p.cfg.OnRecord(peer.Boot(), f.b)
	}
	if !(ans.Score >= 0 && ans.First >= 0) {
		return ans, false
	}
	m.answered.Add(1)
	if !ans.OK {
		m.refused.Add(1)
	}
	peer.SetRTT(q.hit(r.Took))
	return ans, true
}

// worth reports whether the peer is to be asked now.
func (q *asked) worth(now time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !now.Before(q.until)
}

// miss counts an answer that did not come.
func (q *asked) miss(now time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.missed++; q.missed >= askMisses {
		q.until = now.Add(askPause)
	}
}

// hit counts an answer and returns the round trip: it falls fast and rises slowly, since what makes an answer late is
// mostly a busy CPU and not the way.
func (q *asked) hit(took time.Duration) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.missed, q.until = 0, time.Time{}
	switch {
	case q.rtt == 0:
		q.rtt = took
	case took < q.rtt:
		q.rtt += (took - q.rtt) / 2
	default:
		q.rtt += (took - q.rtt) / 16
	}
	return q.rtt
}
