package proxy

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/guard"
	"github.com/grapevine-lb/grapevine/routing"
)

const (
	ticketFor    = 2 * time.Second        // a pull of ours is good for so long
	pullLimit    = 100 * time.Millisecond // for a victim's answer
	pullPause    = 10 * time.Millisecond  // after a victim that gave nothing; it doubles …
	pullPauseMax = 80 * time.Millisecond  // … up to this, until news come
)

// stealMetrics counts pulls.
type stealMetrics struct {
	given  atomic.Uint64 // pulls of ours that were granted
	none   atomic.Uint64 // pulls that were not
	failed atomic.Uint64 // no answer
	came   atomic.Uint64 // requests that came with a valid ticket
	moved  atomic.Uint64 // requests that entered here and were moved to a thief
}

// StealCounts counts the pulls of held requests.
type StealCounts struct {
	Given, None, Failed uint64 // pulls of this agent, by answer
	Came                uint64 // requests that came with a valid ticket
	Moved               uint64 // requests that entered here and went on to another replica while held
}

// Wake makes an idle agent look whether another one holds requests. Call it when a record shows that. The record that
// comes with the answer to a pull wakes nobody: a victim with nothing to give would be asked again at once, for ever.
func (p *Proxy) Wake() {
	p.othersHold.Store(true)
	if p.hearing.Load() {
		return
	}
	p.lookAround()
}

// dry is called by the gate whenever our engine could take more than we have.
func (p *Proxy) dry() {
	if p.othersHold.Load() {
		p.lookAround()
	}
}

func (p *Proxy) lookAround() {
	select {
	case p.stealWake <- struct{}{}:
	default:
	}
}

// steal pulls held requests while our engine could take more than we have. It sleeps unless a record, or our own gate,
// wakes it: an idle fleet sends nothing.
func (p *Proxy) steal(ctx context.Context) {
	rnd := rand.New(rand.NewPCG(p.cfg.Seed, 0x7461616c))
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	pause := pullPause
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.stealWake:
			pause = pullPause
		case <-timer.C:
			pause = min(2*pause, pullPauseMax)
		}
		for ctx.Err() == nil && p.idle() {
			now := time.Now()
			victim := p.cfg.Table.Snapshot().Victim(now, rnd)
			if victim == nil {
				p.othersHold.Store(false)
				break
			}
			if !p.pull(ctx, victim, rnd) {
				timer.Reset(pause)
				break
			}
		}
	}
}

// idle reports whether our engine could start one more request and nothing is held or on its way here.
func (p *Proxy) idle() bool {
	if p.draining.Load() {
		return false
	}
	if r, at := p.cfg.Table.Self().Report(); !at.IsZero() && (r.State != routing.StateReady || r.Flags&(routing.FlagEngineDown|routing.FlagSuspect) != 0) {
		return false
	}
	g := &p.gate
	rate, step := g.account.speed()
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.off && !g.closed && g.queue.len() == 0 && g.expected(now) == 0 && g.starts(rate, step, now) > 0
}

// pull asks a victim for one of its held requests:
//
//	ticket u64 · our boot id u64 · pending prompt tokens u32 · running u32 · prefill rate f64 · round trip u64 ns ·
//	lowest class that we could start u8
//
// The ticket reserves nothing; it lets the request through our gate once.
func (p *Proxy) pull(ctx context.Context, victim *routing.Peer, rnd *rand.Rand) (given bool) {
	a := p.questions.to(victim)
	if a == nil {
		return false
	}
	g := &p.gate
	rate, step := g.account.speed()
	load := p.account.load()
	id := rnd.Uint64() | 1
	now := time.Now()
	g.mu.Lock()
	if g.tickets == nil {
		g.tickets = make(map[uint64]ticket)
	}
	g.tickets[id] = ticket{until: now.Add(ticketFor)}
	pending, lowest := g.pending, g.starts(rate, step, now)
	g.mu.Unlock()

	a.mu.Lock()
	rtt := a.rtt
	a.mu.Unlock()
	if rtt == 0 {
		rtt = time.Millisecond
	}
	le := binary.LittleEndian
	q := le.AppendUint64(make([]byte, 0, 40), id)
	q = le.AppendUint64(q, p.self)
	q = le.AppendUint32(q, uint32(pending))
	q = le.AppendUint32(q, uint32(load.Running))
	q = le.AppendUint64(q, math.Float64bits(rate))
	q = le.AppendUint64(q, uint64(rtt))
	q = append(q, lowest)
	reply, err := a.client.Call(ctx, now.Add(pullLimit), AskSteal, q, nil)
	if err != nil || len(reply) < 5 {
		p.metrics.steal.failed.Add(1)
		return false // it may have been given all the same: the ticket stays good for its time
	}
	f := fields{b: reply}
	given = f.u8() == 1
	tokens := int(f.u32())
	if len(f.b) > 0 && p.cfg.OnRecord != nil {
		p.hearing.Store(true)
		p.cfg.OnRecord(victim.Boot(), f.b)
		p.hearing.Store(false)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !given {
		delete(g.tickets, id)
		p.metrics.steal.none.Add(1)
		return false
	}
	p.metrics.steal.given.Add(1)
	if t, ok := g.tickets[id]; ok { // it may be here already
		t.tokens = max(1, tokens)
		g.tickets[id] = t
	}
	return true
}

// answerSteal answers a pull: given u8 · prompt tokens that come with it u32 · our load record.
func (p *Proxy) answerSteal(payload, reply []byte) ([]byte, bool) {
	f := fields{b: payload}
	id, boot := f.u64(), f.u64()
	s := routing.Thief{Pending: int(f.u32()), Running: int(f.u32()), Rate: math.Float64frombits(f.u64()), RoundTrip: time.Duration(f.u64())}
	if f.bad || !(s.Rate > 0) || s.RoundTrip < 0 {
		return reply, false
	}
	if len(f.b) > 0 { // older agents do not say
		s.Lowest = f.u8()
	}
	tokens := 0
	if thief := p.cfg.Table.Peer(boot); thief != nil && boot != p.self && id != 0 {
		tokens = p.gate.give(p.cfg.Table, thief, id, s, time.Now())
	}
	given := byte(0)
	if tokens > 0 {
		given = 1
		p.step(stepPulled)
	}
	reply = append(reply, given)
	reply = binary.LittleEndian.AppendUint32(reply, uint32(tokens))
	if p.cfg.Record != nil {
		reply = append(reply, p.cfg.Record()...)
	}
	return reply, true
}

// give takes the first held request that is worth moving to the thief out of the queue, so that it can no longer start
// here, and tells its exchange. It returns the prompt tokens that the thief must compute, 0 if there is none.
func (g *gate) give(t *routing.Table, thief *routing.Peer, id uint64, s routing.Thief, now time.Time) (tokens int) {
	rate, _ := g.account.speed()
	snap := t.Snapshot()
	g.mu.Lock()
	defer g.mu.Unlock()
	own := g.state(rate)
	full := own.FullKV(0)
	var taken *hold
	n := 0
	g.queue.each(func(h *hold, before int) bool {
		n++
		if !h.fixed && (s.Lowest == 0 || h.line() < int(s.Lowest)) && snap.Serves(thief, h.req) {
			x := routing.Held{Before: g.pending + before, Here: h.tokens, There: t.Uncached(thief, h.req, now), Rate: rate, FullKV: full}
			if s.WorthMoving(x) {
				taken, tokens = h, max(1, x.There)
			}
		}
		return taken == nil && n < routing.StealLook
	})
	if taken == nil {
		return 0
	}
	if guard.Claim.Off() {
		select {
		case taken.ready <- leave{how: leftStolen, thief: thief.Boot(), ticket: id}:
		default:
		}
		return tokens
	}
	g.queue.remove(taken)
	g.metrics.stolen.Add(1)
	taken.ready <- leave{how: leftStolen, thief: thief.Boot(), ticket: id}
	return tokens
}

// Steps of the protocol at which tests stop the world.
const (
	stepHeld    = "held"    // the victim has said held
	stepPulled  = "pulled"  // the victim has taken its claim back and told nobody yet
	stepMoved   = "moved"   // the entry knows where it goes
	stepInvited = "invited" // the thief let it through its gate
	stepStarted = "started" // somebody is about to give it to its engine
)

func (p *Proxy) step(name string) {
	if p.cfg.Step != nil {
		p.cfg.Step(name)
	}
}
