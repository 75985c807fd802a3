package gossip

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Limits of load records per agent. The cost of gossip goes by packets, so that is the first limit.
const (
	packetBudget    = 400 // packets/s
	minPacketBudget = 100 // what shedding leaves

	recordBytes = RecordSize + 2 + 28 // both type bytes, IPv4 and UDP headers
	cryptBytes  = 29                  // version, nonce and tag of AES-GCM

	minRate, maxRate = 0.2, 10.0 // records/s

	urgentTimes = 3 // sendings of a flag change
	urgentGap   = 100 * time.Millisecond

	staleSample = 500 * time.Millisecond // age of a report, made ten times as often, that says its agent was held up
)

// Budget is how often records may go out for a number of peers.
type Budget struct {
	Rate      float64       // records/s in the mean
	Gap       time.Duration // shortest time between two records
	Heartbeat time.Duration // longest, before jitter
}

// budgetFor is the publishing rule:
//
//	rate      = min(packets/s, bytes/s ÷ record bytes) ÷ peers, between 0.2 and 10
//	gap       = max(MinGap, 1/rate)
//	heartbeat = max(Heartbeat, 4·gap)
//
// peers is the number of direct targets, bytes the size of a record on the wire.
func budgetFor(p *Profile, peers, bytes, packets int) Budget {
	rate := min(float64(packets), float64(p.Bytes)/float64(bytes)) / float64(max(peers, 1))
	rate = min(max(rate, minRate), maxRate)
	gap := max(p.MinGap, time.Duration(float64(time.Second)/rate))
	return Budget{Rate: rate, Gap: gap, Heartbeat: max(p.Heartbeat, 4*gap)}
}

// change is how much a report differs from the last one sent.
type change uint8

const (
	changeNone   change = iota
	changeLoad          // worth a record within the budget
	changeUrgent        // flags or state: goes at once, three times
)

// compare decides whether now is worth a record when the peers know sent:
// the predicted wait of a 1,000-token prompt moved by at least max(20 ms, 10 %), or waiting or held crossed 0, 1, 2, 4, 8, …,
// or KV use crossed 0.80, 0.90, 0.95 (0.02 hysteresis), or the model list changed, or the peers were told of half a second
// ago or more and now is newer: a process that was stopped wakes with a heartbeat due and an old report in hand. Any change
// of flags or state is urgent.
func compare(sent, now *routing.Report) change {
	switch {
	case sent.Flags != now.Flags, sent.State != now.State, sent.LowestClass != now.LowestClass, sent.Kept != now.Kept, sent.Goodbye != now.Goodbye:
		return changeUrgent
	case octave(sent.Waiting) != octave(now.Waiting), octave(sent.Held) != octave(now.Held):
		return changeLoad
	case sent.ModelsDigest != now.ModelsDigest, sent.Weight != now.Weight, sent.RunLimit != now.RunLimit:
		return changeLoad
	case crossedKV(sent.KVUsed, now.KVUsed):
		return changeLoad
	case sent.Age >= staleSample && now.Age < sent.Age/2:
		return changeLoad
	}
	a, b := predictedWait(sent), predictedWait(now)
	if math.Abs(a-b) >= max(0.020, 0.10*a) {
		return changeLoad
	}
	return changeNone
}

// octave numbers the ranges 0, 1, 2–3, 4–7, …; unknown is a range of its own.
func octave(o routing.Opt[int]) int {
	if !o.OK {
		return -1
	}
	return bits.Len(uint(max(o.V, 0)))
}

// predictedWait is the time in seconds until a prompt of 1,000 uncached tokens would give its first token, the measure
// that choosing goes by: what is before it in the queue, itself, and the harm to streams that decode.
func predictedWait(r *routing.Report) float64 {
	const prompt, defaultRate = 1000.0, 2000.0
	rate := r.PrefillRate.Or(defaultRate)
	if rate <= 0 {
		rate = defaultRate
	}
	q := float64(r.PendingTokens.Or(0) + r.HeldTokens.Or(0))
	decoding := 0.05*float64(min(r.Running.Or(0), 32)) + 0.1*float64(r.Waiting.Or(0))
	return (q+prompt)/rate + prompt/rate*decoding
}

var kvMarks = [...]float64{0.80, 0.90, 0.95}

const kvHysteresis = 0.02

// crossedKV reports whether KV use rose to a mark or fell 0.02 below one since the last record.
func crossedKV(sent, now routing.Opt[float64]) bool {
	if sent.OK != now.OK {
		return true
	}
	for _, m := range kvMarks {
		if sent.V < m && now.V >= m || sent.V >= m && now.V < m-kvHysteresis {
			return true
		}
	}
	return false
}

// pacer decides when a record goes out. It is pure: the time and the randomness come in.
type pacer struct {
	budget Budget
	random func() float64 // [0, 1)

	sent   routing.Report // what the peers know
	last   time.Time      // when they were told; zero: never
	next   time.Time      // next heartbeat
	tokens float64        // records that may go out early, at most 2 s worth
	filled time.Time

	repeats  int // sendings of a flag change still to come
	repeatAt time.Time
}

func newPacer(b Budget) *pacer { return &pacer{budget: b, random: rand.Float64} }

// setBudget takes a new budget when the number of peers changed. A shorter heartbeat counts at once.
func (p *pacer) setBudget(b Budget, now time.Time) {
	p.refill(now)
	p.budget = b
	if limit := now.Add(b.Heartbeat); p.next.After(limit) {
		p.next = limit
	}
}

// burst asks for so many sendings, the first at once (or, while another burst runs, at its next turn).
func (p *pacer) burst(times int, now time.Time) {
	if p.repeats == 0 {
		p.repeatAt = now
	}
	p.repeats = max(p.repeats, times)
}

// due reports whether cur is to be sent now, and if not, after which time to ask again.
func (p *pacer) due(cur *routing.Report, now time.Time) (send bool, wait time.Duration) {
	if p.last.IsZero() {
		return true, 0
	}
	p.refill(now)
	ch := compare(&p.sent, cur)
	if ch == changeUrgent {
		p.burst(urgentTimes, now)
	}
	if p.repeats > 0 && !now.Before(p.repeatAt) {
		return true, 0
	}
	if !now.Before(p.next) {
		return true, 0
	}
	wait = p.next.Sub(now)
	if p.repeats > 0 {
		wait = min(wait, p.repeatAt.Sub(now))
	}
	if ch != changeNone {
		at := p.last.Add(p.budget.Gap)
		if p.tokens < 1 {
			need := time.Duration((1 - p.tokens) / p.budget.Rate * float64(time.Second))
			if t := now.Add(need); t.After(at) {
				at = t
			}
		}
		if !now.Before(at) {
			return true, 0
		}
		wait = min(wait, at.Sub(now))
	}
	return false, max(wait, time.Millisecond)
}

// wrote notes that cur was sent.
func (p *pacer) wrote(cur *routing.Report, now time.Time) {
	p.refill(now)
	p.sent, p.last = *cur, now
	p.tokens = max(p.tokens-1, -2*p.budget.Rate) // a burst and the heartbeats are paid for later, within reason
	p.next = now.Add(time.Duration((0.8 + 0.4*p.random()) * float64(p.budget.Heartbeat)))
	if p.repeats > 0 {
		p.repeats--
		p.repeatAt = now.Add(urgentGap)
	}
}

func (p *pacer) refill(now time.Time) {
	if p.filled.IsZero() {
		p.tokens = 2 * p.budget.Rate
	} else {
		p.tokens = min(p.tokens+p.budget.Rate*now.Sub(p.filled).Seconds(), 2*p.budget.Rate)
	}
	p.filled = now
}

// promise is what the record says about the next one: the heartbeat with its jitter.
func (p *pacer) promise() time.Duration {
	return time.Duration(1.2 * float64(p.budget.Heartbeat))
}
