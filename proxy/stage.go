package proxy

import (
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Between agents the exchange itself says what becomes of a request (design section 5.4). The entry agent announces that
// it understands, and whether the request may be given away; the target says held as soon as it waits at its gate, and
// started just before the engine gets the first byte, as interim 102 heads. A request that goes to the engine at once
// says neither: it counts as started, and costs no further packet.
const (
	headerStages = "x-grapevine-stages" // on requests: stagesMovable or stagesFixed
	headerStage  = "x-grapevine-stage"  // on interim answers
	headerMoved  = "x-grapevine-moved"  // on the answer that ends a moved request: thief's boot id, ticket
	headerTicket = "x-grapevine-ticket" // on requests: the thief's own word that it takes this one
	headerLimit  = "x-grapevine-limit"  // on requests: the cost in ns beyond which the target may refuse, once

	stagesMovable = "1"
	stagesFixed   = "0"

	stageHeld    = "held"
	stageStarted = "started"
)

// maxMoves bounds how often one request is moved or handed over: stolen once, and drains.
const maxMoves = 4

// stages is what an attempt's target said so far. The upstream's goroutines set it.
type stages struct{ held, started atomic.Bool }

// notRun reports whether the target said that it holds the request and never that it started.
func (s *stages) notRun() bool { return s.held.Load() && !s.started.Load() }

// interimWriter is a Downstream that can say something before its answer.
type interimWriter interface {
	// Interim sends an interim 102 head.
	Interim(h Header) error
}

// stage says to the entry agent what becomes of its request.
func (x *exchange) stage(name string) {
	if x.role != roleTarget || x.in.Header.Get(headerStages) == "" {
		return
	}
	if w, ok := x.down.(interimWriter); ok {
		_ = w.Interim(Header{{headerStage, name}}) // a lost entry ends the exchange by itself
	}
}

// onInterim takes what a target says.
func (x *exchange) onInterim(a *attempt, w *watch) func(Header) {
	return func(h Header) {
		switch h.Get(headerStage) {
		case stageHeld:
			a.stages.held.Store(true)
			w.set(0, errCauseFirst, time.Now()) // it counts from the start at the engine
		case stageStarted:
			a.stages.started.Store(true)
			w.set(x.first, errCauseFirst, time.Now())
		}
	}
}

// moveFields adds to a request for another agent what it needs to hold and move it.
func (x *exchange) moveFields(h *Header, peer *routing.Peer) {
	if peer.Member().Version < routing.AskVersion {
		return
	}
	if x.limit > 0 && x.body.complete() {
		h.Set(headerLimit, strconv.FormatInt(int64(x.limit), 10))
	}
	if x.p.gate.off {
		return
	}
	stages := stagesMovable
	if x.fixed || !x.body.complete() {
		stages = stagesFixed
	}
	h.Set(headerStages, stages)
	if x.ticket != 0 {
		h.Set(headerTicket, strconv.FormatUint(x.ticket, 16))
	}
}

// readMoveFields takes from a request what moveFields added.
func (x *exchange) readMoveFields() {
	x.fixed = x.in.Header.Get(headerStages) != stagesMovable
	if t, ok := parseBoot(x.in.Header.Get(headerTicket)); ok {
		x.ticket = t
	}
	if n, err := strconv.ParseInt(x.in.Header.Get(headerLimit), 10, 64); err == nil {
		x.limit = time.Duration(n)
	}
}

// errBusier is a target's answer to an entry agent that chose it for a cost which holds no longer; never for clients.
var errBusier = &apiError{Status: 503, Code: "busier", Reason: "busier", RetryAfter: time.Second,
	Message: "The replica has become busier than it said."}

// busier reports whether our replica now costs the request more than the entry agent is ready to pay: then it picks again,
// with the record that comes with the refusal. Two agents that asked at the same moment part so.
func (x *exchange) busier(now time.Time) bool {
	if x.role != roleTarget || x.limit <= 0 || x.ticket != 0 {
		return false
	}
	a := x.p.cfg.Table.Answer(&x.req, now)
	return !a.OK || a.Score > x.limit.Seconds()
}

// movedTo reads where a target says that the request went.
func movedTo(v string) (l leave, ok bool) {
	boot, ticket, _ := strings.Cut(v, " ")
	if l.thief, ok = parseBoot(boot); !ok {
		return leave{}, false
	}
	if l.ticket, ok = parseBoot(ticket); !ok {
		return leave{}, false
	}
	l.how = leftStolen
	return l, true
}

// failMoved answers the entry agent that its request was given to another one.
func (x *exchange) failMoved() {
	e := *errMoved
	x.fail(&e, Field{headerMoved, formatBoot(x.moved.thief) + " " + formatBoot(x.moved.ticket)})
}

// after says where a request goes that was moved: to the thief with its ticket, or to whom the policy picks.
func (x *exchange) after() choice {
	l := x.moved
	x.moved = leave{}
	if l.how == leftStolen {
		x.fixed = true
		if p := x.p.cfg.Table.Peer(l.thief); p != nil && !x.wasTried(l.thief) {
			x.ticket, x.limit = l.ticket, 0
			x.p.metrics.steal.moved.Add(1)
			x.p.step(stepMoved)
			return choice{Peer: p, Tokens: x.req.PromptTokens, Reason: routing.ReasonMoved}
		}
	}
	return x.pick() // handed over by a drain, or the thief is gone: as at first
}

func (x *exchange) wasTried(boot uint64) bool {
	for _, b := range x.tried {
		if b == boot {
			return true
		}
	}
	return false
}
