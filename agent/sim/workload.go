package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Workloads are the names of the built-in traces, the default first.
var Workloads = []string{"chat", "agents"}

// Workload returns a built-in trace, always the same for a name:
//
//	chat     10,000 requests without shared prefixes, lognormal lengths: about 1,150 tokens in, 210 out
//	agents   40 applications with system prompts of their own, sessions of 6 growing steps: about 8,000 in, 100 out
func Workload(name string) (*Trace, error) {
	rnd := rand.New(rand.NewPCG(1, 2))
	t := &Trace{Name: name}
	switch name {
	case "", "chat":
		t.Name = "chat"
		for i := range 10_000 {
			t.Rows = append(t.Rows, Row{At: time.Duration(i) * 100 * time.Millisecond,
				Prompt: lognormal(rnd, 760, 0.9, 12_000), Output: lognormal(rnd, 165, 0.7, 2_000)})
		}
	case "agents":
		t.Prefixes = true
		t.agents(rnd)
	default:
		return nil, fmt.Errorf("%w: no built-in workload %q, there are %v", ErrTrace, name, Workloads)
	}
	return t, nil
}

// lognormal draws whole tokens around a median.
func lognormal(rnd *rand.Rand, median, sigma float64, most int) int {
	return min(most, max(1, int(median*math.Exp(sigma*rnd.NormFloat64()))))
}

// agents interleaves sessions; each step's prompt is all of the steps before, the answers and something new.
func (t *Trace) agents(rnd *rand.Rand) {
	type session struct {
		blocks []uint64
		tokens int
		steps  int
	}
	system := make([][]uint64, 40)
	for a := range system {
		for b := range 2 + rnd.IntN(9) {
			system[a] = append(system[a], mix(uint64(a)<<32|uint64(b)))
		}
	}
	open := make([]*session, 600) // so many that a session pauses for seconds even when 16 replicas share them
	next := uint64(1 << 48)
	for i := range 20_000 {
		k := rnd.IntN(len(open))
		s := open[k]
		if s == nil {
			a := min(rnd.IntN(len(system)), rnd.IntN(len(system))) // some are busier
			s = &session{blocks: append([]uint64(nil), system[a]...), steps: 1 + rnd.IntN(11)}
			s.tokens = len(s.blocks) * blockTokens
			open[k] = s
		}
		s.tokens += lognormal(rnd, 700, 0.8, 8_000)
		for len(s.blocks) < (s.tokens+blockTokens-1)/blockTokens {
			next++
			s.blocks = append(s.blocks, mix(next))
		}
		out := lognormal(rnd, 80, 0.7, 1_000)
		t.Rows = append(t.Rows, Row{At: time.Duration(i) * 100 * time.Millisecond, Prompt: s.tokens, Output: out,
			Blocks: append([]uint64(nil), s.blocks...)})
		if s.steps--; s.steps == 0 || s.tokens > 40_000 {
			open[k] = nil
		}
	}
}

// Arrivals says when requests come.
type Arrivals struct {
	Mode string  // "poisson" (""), "gamma", "trace": the trace's own times, scaled to the rate
	CV   float64 // coefficient of variation of the gaps of "gamma"; 1 is Poisson
}

func (a Arrivals) validate() error {
	switch a.Mode {
	case "", "poisson", "trace":
		return nil
	case "gamma":
		if a.CV > 0 && a.CV <= 100 {
			return nil
		}
		return fmt.Errorf("gamma arrivals need a coefficient of variation above 0 and at most 100, not %g", a.CV)
	}
	return fmt.Errorf("unknown arrivals %q: poisson, gamma or trace", a.Mode)
}

// source hands out the requests of a run one by one.
//
// Where no prefix is shared, lengths are drawn from the trace at random; otherwise the order is kept, and a run that is
// longer than the trace interleaves copies of it ("tenants", which share nothing), so that within one the distance
// between two uses of a prefix stays what it was.
type source struct {
	trace  *Trace
	mode   Arrivals
	rate   float64 // requests/s
	total  int
	n      int
	at     float64 // s
	rnd    *rand.Rand
	offset int
	copies int
}

func newSource(t *Trace, a Arrivals, rate float64, total int, seed uint64) *source {
	s := &source{trace: t, mode: a, rate: rate, total: total, rnd: rand.New(rand.NewPCG(seed, 0x617272))}
	s.copies = max(1, (total+len(t.Rows)-1)/len(t.Rows))
	if s.copies == 1 && len(t.Rows) > total {
		s.offset = s.rnd.IntN(len(t.Rows) - total + 1)
	}
	return s
}

// next fills in arrival, lengths and blocks; false at the end. The blocks are appended to the request's own room.
func (s *source) next(r *request) bool {
	if s.n >= s.total {
		return false
	}
	i := s.n
	s.n++
	rows := s.trace.Rows
	var k, tenant int
	switch {
	case s.mode.Mode == "trace":
		k, tenant = (s.offset+i)%len(rows), i/len(rows)
	case !s.trace.Prefixes:
		k = s.rnd.IntN(len(rows))
	default:
		k, tenant = (s.offset+i/s.copies)%len(rows), i%s.copies
	}
	switch s.mode.Mode {
	case "gamma":
		shape := 1 / (s.mode.CV * s.mode.CV)
		s.at += gamma(s.rnd, shape) / shape / s.rate
	case "trace":
		first, last := rows[0].At, rows[len(rows)-1].At
		span := (last - first).Seconds() * float64(len(rows)) / float64(max(1, len(rows)-1)) // the last gap is a mean one
		if span <= 0 {
			span = 1
		}
		x := float64((s.offset+i)/len(rows))*span + (rows[k].At - rows[s.offset].At).Seconds()
		s.at = x * float64(len(rows)) / span / s.rate
	default:
		s.at += s.rnd.ExpFloat64() / s.rate
	}
	r.arrival = int64(s.at * 1e9)
	row := &rows[k]
	r.in, r.out = row.Prompt, row.Output
	r.blocks = r.blocks[:0]
	for _, h := range row.Blocks {
		if tenant > 0 {
			h = mix(h + uint64(tenant)<<48)
		}
		r.blocks = append(r.blocks, h&^routing.FineBlock)
	}
	return true
}

// gamma draws from the gamma distribution with scale 1 (Marsaglia and Tsang).
func gamma(rnd *rand.Rand, shape float64) float64 {
	if shape < 1 {
		return gamma(rnd, shape+1) * math.Pow(rnd.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rnd.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-rnd.Float64()) < 0.5*x*x+d*(1-v+math.Log(v)) {
			return d * v
		}
	}
}
