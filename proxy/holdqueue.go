package proxy

import (
	"cmp"

	"github.com/grapevine-lb/grapevine/routing"
)

const (
	// restShare is the share of the tokens that what waits below a class gets while the class has somebody waiting.
	restShare = 0.1
	// holdPlace is how many prompt tokens there is room for with each place in the queue.
	holdPlace = 8192
	// outputGuess is how many tokens an answer is taken for whose request names no limit.
	outputGuess = 256
	// tenantShare is the share of the places that one known tenant may take.
	tenantShare = 0.75
)

// holdQueue is the order in which held requests go to the engine. The gate's lock guards it.
//
// A higher class goes first, but for a tenth of the tokens, which those below it get. Within a class tenants share by tokens,
// prompt and answer: the one that was given least has its next turn, with its oldest request; who comes, or comes back,
// starts level with the one whose turn was last, so that nobody saves up turns (start-time fair queueing).
type holdQueue struct {
	digest *routing.Digest // is told which prefixes wait here; nil = nobody is
	list   []*hold         // in the order of arrival
	sum    int             // prompt tokens
	lines  [routing.ClassBatch]line
}

// line is what waits in one class.
type line struct {
	n       int
	tokens  int                // of prompts
	owed    float64            // tokens that the classes below may have before this one
	clock   float64            // what the tenant whose turn was last had been given before it
	tenants map[uint64]*tenant // who waits, and who was given more than clock
}

// tenant is one of those who share a class.
type tenant struct {
	given float64 // tokens
	n     int     // held
}

func (q *holdQueue) len() int    { return len(q.list) }
func (q *holdQueue) tokens() int { return q.sum }

// places is how full the queue is, by requests or by tokens.
func (q *holdQueue) places() int { return max(len(q.list), q.sum/holdPlace) }

// line is the index of the request's class.
func (h *hold) line() int {
	c := h.req.Class
	if c < routing.ClassPriority || c > routing.ClassBatch {
		c = routing.ClassDefault
	}
	return int(c) - 1
}

func (q *holdQueue) push(h *hold) {
	l := &q.lines[h.line()]
	if l.tenants == nil {
		l.tenants = map[uint64]*tenant{}
	}
	t := l.tenants[h.tenant]
	if t == nil {
		t = &tenant{}
		l.tenants[h.tenant] = t
	}
	if t.n == 0 {
		t.given = max(t.given, l.clock)
	}
	t.n++
	l.n++
	l.tokens += h.tokens
	h.owner, h.cost = t, float64(h.tokens+cmp.Or(h.req.MaxTokens, outputGuess))
	q.list = append(q.list, h)
	q.sum += h.tokens
	if q.digest != nil && len(h.req.Prefix) > 0 {
		q.digest.Expect(h.req.Prefix)
	}
}

// head returns the one whose turn is next, or nil.
func (q *holdQueue) head() *hold { return q.headAbove(len(q.lines)) }

// headAbove is the same among the classes above a line.
func (q *holdQueue) headAbove(line int) *hold {
	var first [len(q.lines)]*hold
	for _, h := range q.list {
		if h.line() >= line {
			continue
		}
		if f := &first[h.line()]; *f == nil || h.owner.given < (*f).owner.given {
			*f = h
		}
	}
	var next *hold
	for c := len(first) - 1; c >= 0; c-- { // from the lowest class up
		if h := first[c]; h != nil && (next == nil || q.lines[c].owed < next.cost) {
			next = h
		}
	}
	return next
}

// take removes h because its turn has come, and counts that.
func (q *holdQueue) take(h *hold) {
	c := h.line()
	l := &q.lines[c]
	l.clock = max(l.clock, h.owner.given)
	h.owner.given += h.cost
	q.remove(h)
	below := 0
	for i := range q.lines[c+1:] {
		below += q.lines[c+1+i].n
	}
	if below > 0 {
		l.owed += h.cost * restShare / (1 - restShare)
	} else {
		l.owed = 0
	}
	for i := range q.lines[:c] {
		q.lines[i].owed = max(0, q.lines[i].owed-h.cost)
	}
}

// remove takes h out and reports whether it was in.
func (q *holdQueue) remove(h *hold) bool {
	for i, x := range q.list {
		if x != h {
			continue
		}
		copy(q.list[i:], q.list[i+1:])
		q.list[len(q.list)-1] = nil
		q.list = q.list[:len(q.list)-1]
		q.sum -= h.tokens
		if q.digest != nil && len(h.req.Prefix) > 0 {
			q.digest.Forgo(h.req.Prefix)
		}
		l := &q.lines[h.line()]
		l.n--
		l.tokens -= h.tokens
		h.owner.n--
		if l.n == 0 {
			*l = line{} // nobody waits: nobody has had too much
		} else if len(l.tenants) > 2*l.n+16 {
			for id, t := range l.tenants {
				if t.n == 0 && t.given <= l.clock {
					delete(l.tenants, id)
				}
			}
		}
		return true
	}
	return false
}

// each calls f by class and then by arrival, with the prompt tokens before each, until it returns false.
func (q *holdQueue) each(f func(h *hold, before int) bool) {
	before := 0
	for c := range q.lines {
		if q.lines[c].n == 0 {
			continue
		}
		for _, h := range q.list {
			if h.line() != c {
				continue
			}
			if !f(h, before) {
				return
			}
			before += h.tokens
		}
	}
}

// ahead returns how many go before a newcomer, at the most, and their prompt tokens: those of higher classes, and of its
// own class what is before its tenant's next turn.
func (q *holdQueue) ahead(h *hold) (n, tokens int) {
	c := h.line()
	for i := range q.lines[:c] {
		n, tokens = n+q.lines[i].n, tokens+q.lines[i].tokens
	}
	l := &q.lines[c]
	if l.n == 0 {
		return n, tokens
	}
	mine, waiting := 0, 1
	for id, t := range l.tenants {
		switch {
		case id == h.tenant:
			mine = t.n
		case t.n > 0:
			waiting++
		}
	}
	before := min(l.n, (mine+1)*waiting-1)
	return n + before, tokens + l.tokens*before/l.n
}

// yields returns who leaves a full queue for h, or nil: the youngest of the lowest class below it; else, where its tenant
// has less than another of its class, the youngest of the one that has most.
func (q *holdQueue) yields(h *hold) *hold {
	c := h.line()
	for low := len(q.lines) - 1; low > c; low-- {
		if q.lines[low].n > 0 {
			return q.youngest(func(x *hold) bool { return x.line() == low })
		}
	}
	var most *tenant
	mine := 0
	for _, x := range q.list { // and not over the map, whose order is random
		switch {
		case x.line() != c:
		case x.tenant == h.tenant:
			mine++
		case most == nil || x.owner.n > most.n:
			most = x.owner
		}
	}
	if most == nil || most.n <= mine+1 {
		return nil
	}
	return q.youngest(func(x *hold) bool { return x.owner == most })
}

func (q *holdQueue) youngest(of func(*hold) bool) *hold {
	for i := len(q.list) - 1; i >= 0; i-- {
		if of(q.list[i]) {
			return q.list[i]
		}
	}
	return nil
}

// crowded reports whether h's tenant, if it is known, has as much of the queue as it may.
func (q *holdQueue) crowded(h *hold, limit int) bool {
	t := q.lines[h.line()].tenants[h.tenant]
	return h.tenant != 0 && t != nil && float64(t.n+1) > max(1, tenantShare*float64(limit))
}
