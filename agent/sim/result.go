package sim

import (
	"slices"
	"time"
)

// Counts are whole numbers over the run, warm-up included.
type Counts struct {
	Done      int `json:"done"`
	Failed    int `json:"failed"`    // no whole answer
	Cut       int `json:"cut"`       // of the failed ones, answers that were cut off because their entry agent died
	Unended   int `json:"unended"`   // still at work ten minutes after the last arrival
	Forwarded int `json:"forwarded"` // answered by another replica than the entry's
	Asked     int `json:"asked"`     // picks that asked
	Questions int `json:"questions"` // questions answered by others
	Held      int `json:"held"`      // waited at a gate
	Busier    int `json:"busier"`    // refused once by a target that had become busier than it had said
	Stolen    int `json:"stolen"`    // pulled by an idle agent while held
	Pulls     int `json:"pulls"`     // pulls sent
	Retried   int `json:"retried"`   // sent again before any content
	Continued int `json:"continued"` // broken off and continued elsewhere
	Repeated  int `json:"repeated"`  // by the client, whose agent died
	Refused   int `json:"refused"`   // nobody took it; the client comes again
	TooLong   int `json:"too_long"`  // longer than the engine's context
	Preempted int `json:"preempted"` // by an engine short of KV space
	Steps     int `json:"steps"`     // of all engines
}

// Latency is a distribution, in seconds.
type Latency struct {
	Mean float64 `json:"mean_s"`
	P50  float64 `json:"p50_s"`
	P95  float64 `json:"p95_s"`
	P99  float64 `json:"p99_s"`
}

// Result is what one run came to. Shares are 0..1.
type Result struct {
	Policy   string  `json:"policy"`
	Trace    string  `json:"trace"`
	Replicas int     `json:"replicas"`
	Rate     float64 `json:"rate"`     // requests/s
	Load     float64 `json:"load"`     // share of the fleet's saturated throughput
	Requests int     `json:"requests"` // measured: between warm-up and end of the run

	TTFT     Latency `json:"ttft"`
	PerToken Latency `json:"per_token"`
	Good     float64 `json:"goodput"` // share of the requests that kept the SLO
	// Served is the same without the answers that were cut off with their entry agent, which no number of replicas saves.
	Served  float64 `json:"served_goodput"`
	HitRate float64 `json:"hit_rate"` // share of the prompt tokens that a cache had
	Busy    float64 `json:"busy"`     // mean share of the time that engines worked
	Busiest float64 `json:"busiest"`

	Counts Counts `json:"counts"`
	// Seconds of virtual time.
	Seconds float64 `json:"seconds"`
}

// Share is a count as a share of the requests that ended.
func (r *Result) Share(n int) float64 {
	return float64(n) / float64(max(1, r.Counts.Done+r.Counts.Failed))
}

// samples is what is kept of each measured request.
type samples struct {
	ttft, perToken []float32 // s
	good, n, cut   int
	cached, prompt int64
}

// measures reports whether a request counts: after the warm-up, and not among the last, which run in an emptying fleet.
func (s *Sim) measures(r *request) bool {
	return r.arrival >= int64(s.cfg.Warm) && r.arrival <= int64(0.97*float64(s.cfg.Duration))
}

func (x *samples) add(s *Sim, r *request, now int64) {
	if !s.measures(r) {
		return
	}
	x.n++
	ttft := r.firstAt - r.arrival
	x.ttft = append(x.ttft, float32(float64(ttft)/1e9))
	per := int64(0)
	if n := int64(r.out + r.answered - 1); n > 0 {
		per = (now - r.firstAt) / n
		x.perToken = append(x.perToken, float32(float64(per)/1e9))
	}
	if ttft <= int64(s.cfg.SLO.TTFT) && per <= int64(s.cfg.SLO.PerToken) {
		x.good++
	}
	x.cached += int64(r.hit)
	x.prompt += int64(r.in - r.answered)
}

// failed counts a request that got no answer; it has no time to first token.
func (x *samples) failed(s *Sim, r *request) {
	if s.measures(r) {
		x.n++
	}
}

// result sums up.
func (s *Sim) result() Result {
	end := s.now
	for _, r := range s.live {
		if r == nil || r == s.next {
			continue
		}
		s.counts.Unended++
		if s.measures(r) { // as slow as the run was patient
			s.samples.n++
			first := end
			if r.firstAt > 0 {
				first = r.firstAt
			}
			s.samples.ttft = append(s.samples.ttft, float32(float64(first-r.arrival)/1e9))
		}
	}
	x := &s.samples
	res := Result{Policy: s.cfg.Policy, Trace: s.cfg.Trace.Name, Replicas: s.cfg.Replicas, Rate: s.cfg.Rate, Load: s.cfg.Load,
		Requests: x.n, TTFT: latency(x.ttft), PerToken: latency(x.perToken), Good: float64(x.good) / float64(max(1, x.n)),
		Served:  float64(x.good) / float64(max(1, x.n-x.cut)),
		HitRate: float64(x.cached) / float64(max(1, x.prompt)), Counts: s.counts, Seconds: float64(end) / 1e9}
	if res.Policy == "" {
		res.Policy = "auto"
	}
	for _, a := range s.agents {
		c := a.engine.Counters()
		busy := c.Busy
		if a.alive {
			busy += a.busy
		} else {
			busy = a.busy
		}
		share := busy.Seconds() / max(time.Duration(end).Seconds(), 1e-9)
		res.Busy += share / float64(len(s.agents))
		res.Busiest = max(res.Busiest, share)
		res.Counts.Preempted += int(c.Preemptions)
		res.Counts.Steps += int(c.Steps)
	}
	return res
}

func latency(x []float32) Latency {
	if len(x) == 0 {
		return Latency{}
	}
	slices.Sort(x)
	sum := 0.0
	for _, v := range x {
		sum += float64(v)
	}
	q := func(p float64) float64 { return float64(x[int(p*float64(len(x)-1))]) }
	return Latency{Mean: sum / float64(len(x)), P50: q(0.5), P95: q(0.95), P99: q(0.99)}
}
