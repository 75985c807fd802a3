package sim

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// Config says what is simulated. Zero values mean the default that each field names.
type Config struct {
	Trace    *Trace
	Arrivals Arrivals
	Engine   enginesim.Params // zero: the profile "h100-8b"
	Speeds   []float64        // of the replicas, repeated as often as needed; nil = all 1
	Replicas int              // 0 = 16

	Rate     float64       // requests/s over the fleet; 0 = by Load
	Load     float64       // share of the fleet's saturated throughput, 0 = 0.85
	Capacity float64       // requests/s of one saturated replica; 0 = measured here
	Requests int           // 0 = by Duration
	Duration time.Duration // of the arrivals; 0 = 180 s
	Warm     time.Duration // arrivals before are not counted; negative = 0, 0 = 20 s, at most a quarter of the run

	Policy string // see ParsePolicy; "" = auto
	Gate   Switch
	Steal  Switch
	Digest Switch
	Ask    *int // replicas asked in any fleet; nil = the product's rule
	Front  int  // agents that get traffic; 0 = all

	GossipAge   time.Duration // mean age of a gossiped record; 0 = 200 ms
	Loss        float64       // share of gossiped records and digest changes lost, 0..1
	DigestEvery time.Duration // between two changes of a digest; 0 = 1 s
	Hop         time.Duration // one way between agents of a zone; 0 = 0.5 ms
	ZoneHop     time.Duration // … of different zones; 0 = 1 ms
	Zones       int           // replica i is in zone i modulo Zones; 0 = 1

	Kill     Outage // replica 1 dies (the only one, if there is one)
	LoseZone Outage // all replicas of zone 0 die
	Slow     Slowdown

	SLO  SLO
	Seed uint64 // 0 = 1

	// Progress, if set, is told now and then how many requests have ended.
	Progress func(done, total int)
}

// Switch is on by default.
type Switch uint8

const (
	On Switch = iota // the default
	Off
)

// Outage is when replicas die, counted from the start, and when they come back with empty caches; At 0 = never, Back 0
// = never.
type Outage struct{ At, Back time.Duration }

// Slowdown makes replica 0 slower by a factor for a time; End 0 = to the end.
type Slowdown struct {
	At, End time.Duration
	Factor  float64
}

// SLO is what a request must keep to count as good.
type SLO struct {
	TTFT     time.Duration // time to first token; 0 = 2 s
	PerToken time.Duration // mean time per further token; 0 = 50 ms
}

// spec is a policy with its switches.
type spec struct {
	name                string
	exact               bool // sees all engines' true state at each pick, sends at once, holds nothing
	ask                 *int
	gate, steal, digest bool
}

// ParsePolicy reports whether a policy's name is right: one of routing.PolicyNames or "exact", and switches behind it:
//
//	auto/no-ask   auto/ask=3   auto/no-gate   auto/no-steal   auto/no-digest   round_robin/no-gate/no-steal
//
// "exact" is the exact-state twin: the score of "auto" on every engine's true state in the moment of the pick, without
// any message, and without gate and stealing.
func ParsePolicy(name string) error {
	c := Config{Policy: name}
	_, err := c.spec()
	return err
}

func (c *Config) spec() (spec, error) {
	parts := strings.Split(c.Policy, "/")
	s := spec{name: parts[0], ask: c.Ask, gate: c.Gate == On, steal: c.Steal == On, digest: c.Digest == On}
	for _, p := range parts[1:] {
		ask := 0
		switch p {
		case "no-ask":
			s.ask = &ask
		case "no-gate":
			s.gate = false
		case "no-steal":
			s.steal = false
		case "no-digest":
			s.digest = false
		default:
			v, ok := strings.CutPrefix(p, "ask=")
			n, err := strconv.Atoi(v)
			if !ok || err != nil || n < 0 || n > routing.MaxAsk {
				return s, fmt.Errorf("policy %q: unknown switch %q: no-ask, ask=N, no-gate, no-steal, no-digest", c.Policy, p)
			}
			s.ask = &n
		}
	}
	if s.name == "exact" {
		s.exact, s.gate, s.steal, s.name = true, false, false, "auto"
	}
	_, err := s.policy()
	return s, err
}

func (s *spec) policy() (routing.Policy, error) {
	opts := []routing.PolicyOption{routing.WithDigests(s.digest)}
	if s.ask != nil {
		opts = append(opts, routing.WithAsk(*s.ask))
	}
	return routing.NewPolicy(s.name, opts...)
}

// fill puts the defaults in and refuses what makes no sense.
func (c Config) fill() (Config, error) {
	if c.Trace == nil || len(c.Trace.Rows) == 0 {
		return c, errors.New("sim: no trace")
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Engine.Slots == 0 {
		c.Engine, _ = enginesim.Profile("h100-8b") // known
	}
	if err := c.Engine.Validate(); err != nil {
		return c, err
	}
	if c.Replicas == 0 {
		c.Replicas = 16
	}
	if c.Zones == 0 {
		c.Zones = 1
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	def(&c.GossipAge, 200*time.Millisecond)
	def(&c.DigestEvery, time.Second)
	def(&c.Hop, 500*time.Microsecond)
	def(&c.ZoneHop, max(time.Millisecond, c.Hop))
	def(&c.SLO.TTFT, 2*time.Second)
	def(&c.SLO.PerToken, 50*time.Millisecond)
	sum := 0.0
	for i := range max(0, min(c.Replicas, maxReplicas)) {
		x := c.speed(i)
		if !(x > 0 && x <= 1000) {
			return c, fmt.Errorf("sim: speed %g: must be above 0 and at most 1000", x)
		}
		sum += x
	}
	switch {
	case c.Replicas < 1 || c.Replicas > maxReplicas:
		return c, fmt.Errorf("sim: %d replicas: must be 1 to %d", c.Replicas, maxReplicas)
	case c.Zones < 1 || c.Zones > c.Replicas:
		return c, fmt.Errorf("sim: %d zones for %d replicas", c.Zones, c.Replicas)
	case c.Loss < 0 || c.Loss > 1 || math.IsNaN(c.Loss):
		return c, fmt.Errorf("sim: loss %g: must be 0 to 1", c.Loss)
	case c.GossipAge < time.Millisecond || c.DigestEvery < time.Millisecond || c.Hop < 0 || c.ZoneHop < 0:
		return c, errors.New("sim: gossip age and digest period must be at least 1 ms, hops not negative")
	case c.Slow.At > 0 && !(c.Slow.Factor > 0 && c.Slow.Factor <= 1000):
		return c, fmt.Errorf("sim: slow by %g: must be above 0 and at most 1000", c.Slow.Factor)
	case c.LoseZone.At > 0 && c.Zones < 2:
		return c, errors.New("sim: a zone can only be lost where there are at least two")
	}
	if err := c.Arrivals.validate(); err != nil {
		return c, fmt.Errorf("sim: %w", err)
	}
	if _, err := c.spec(); err != nil {
		return c, fmt.Errorf("sim: %w", err)
	}
	if c.Load == 0 {
		c.Load = 0.85
	}
	if c.Capacity == 0 {
		c.Capacity = Capacity(c.Engine, c.Trace)
	}
	if c.Rate == 0 {
		c.Rate = c.Load * c.Capacity * sum
	}
	c.Load = c.Rate / (c.Capacity * sum)
	if !(c.Rate > 0 && c.Rate < 1e7) {
		return c, fmt.Errorf("sim: %g requests/s: out of range (a replica takes %.2f)", c.Rate, c.Capacity)
	}
	switch {
	case c.Requests > 0:
		c.Duration = time.Duration(float64(c.Requests) / c.Rate * 1e9)
	default:
		def(&c.Duration, 180*time.Second)
		c.Requests = max(1, int(c.Rate*c.Duration.Seconds()))
	}
	if c.Duration < 0 || c.Requests < 0 || c.Requests > maxRequests {
		return c, fmt.Errorf("sim: %d requests: must be 1 to %d", c.Requests, maxRequests)
	}
	def(&c.Warm, 20*time.Second)
	c.Warm = min(max(0, c.Warm), c.Duration/4)
	if c.Front <= 0 || c.Front > c.Replicas {
		c.Front = c.Replicas
	}
	return c, nil
}

const (
	maxReplicas = 512
	maxRequests = 100_000_000
)

func (c *Config) speed(i int) float64 {
	if len(c.Speeds) == 0 {
		return 1
	}
	return c.Speeds[i%len(c.Speeds)]
}

// Capacity is the throughput of one saturated replica over the first 2,000 requests of a trace, with a prefix cache of
// its own, in requests/s. Where prefixes are shared a fleet can do better: its caches together hold more.
func Capacity(p enginesim.Params, t *Trace) float64 {
	const enough = 2000
	src := newSource(t, Arrivals{}, 1, min(enough, max(200, len(t.Rows))), 42)
	src.offset = 0
	var jobs []enginesim.Job
	for r := new(request); src.next(r); r = new(request) {
		jobs = append(jobs, enginesim.Job{Prompt: r.in, Output: r.out, Blocks: r.blocks})
	}
	return enginesim.Capacity(p, jobs)
}

// Profile returns the engine of a name that enginesim knows, or of three figures "RATE,STEP,SLOTS": prefill tokens/s,
// duration of a decode step, and requests at once, such as 10000,20ms,32.
func Profile(name string) (enginesim.Params, error) {
	p := strings.Split(name, ",")
	if len(p) == 1 {
		return enginesim.Profile(name)
	}
	bad := fmt.Errorf("profile %q: a name, or prefill tokens/s, decode step, slots, such as 10000,20ms,32", name)
	if len(p) != 3 {
		return enginesim.Params{}, bad
	}
	rate, err1 := strconv.ParseFloat(p[0], 64)
	step, err2 := time.ParseDuration(p[1])
	slots, err3 := strconv.Atoi(p[2])
	if err := errors.Join(err1, err2, err3); err != nil || !(rate >= 1 && rate <= 1e9) || step <= 0 || slots < 1 || slots > 1<<20 {
		return enginesim.Params{}, bad
	}
	return enginesim.Rates(rate, step, slots), nil
}
