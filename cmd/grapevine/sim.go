package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/sim"
)

// simHelp is the text of "grapevine sim -h" before the flags. A test runs the two examples.
const simHelp = `grapevine sim runs the product's own routing code over a trace of requests, in virtual time, with simulated
engines behind it. It answers what a policy is worth and how many replicas a load needs. All times but for the rates
of the engines are a model's: trust ratios, not milliseconds.

What does asking, holding back and stealing bring on this fleet?

  $ grapevine sim --workload chat --replicas 8 --load 0.85 --duration 60s --policy round_robin/no-gate,auto,exact
%s
How many replicas for 60 requests/s, so that 99 %% have their first token within 1 s, even if one of three zones is lost?

  $ grapevine sim --workload chat --rate 60 --slo-ttft 1s --find-replicas --zones 3 --lose-zone 30s --duration 60s
%s
A trace is JSON lines {"t":0.35,"i":2007,"o":139,"h":[24,25]} (seconds, prompt and output tokens, chained ids of
512-token prefix blocks), Mooncake's JSON lines, or Azure's CSV; gzip or not. Policies: those of GRAPEVINE_POLICY, and
"exact", which sees all engines' true state without any message. Switches behind a slash: auto/no-ask, /ask=3, /no-gate,
/no-steal, /no-digest. Replica 1 is the one that dies, replica 0 the one that gets slow, zone 0 the one that is lost.

Flags:
`

// Outputs of the examples in simHelp.
const (
	simExample1 = `  chat: 1144 tokens in, 210 out on average; one saturated replica takes 16.03 requests/s
  8 replicas, 109.0 requests/s, load 0.85, 4698 requests measured

  policy               ttft mean     p50      p95      p99  per token  goodput  hits   busy  forwarded  asked  stolen  failed
  round_robin/no-gate    113.9ms  78.1ms  321.9ms  553.5ms     28.4ms    96.2%  0.0%  95.3%      87.5%   0.0%    0.0%       0
  auto                    66.0ms  52.7ms  146.7ms  236.9ms     26.0ms   100.0%  0.0%  95.0%      75.3%  82.2%    7.9%       0
  exact                   67.6ms  52.8ms  153.4ms  256.9ms     26.7ms   100.0%  0.0%  94.6%      85.7%   0.0%    0.0%       0
`
	simExample2 = `  replicas   good  ttft p50       p99
         4  20.3%  7241.8ms     25.6s
         5  29.0%   317.2ms  4581.9ms
         6  99.6%    61.1ms   397.7ms

  on paper   R·L/T = 60 requests/s · 210 tokens / 3359 tokens/s = 3.7 replicas; at 70 % of that 6; N+1 7; to lose a zone of 3: 9
  simulated  6 replicas keep first token 1s and 50ms a token for 99.0% of the requests
`
)

// simFlags are the flags of "grapevine sim".
type simFlags struct {
	trace, workload, policy, profile, speeds, arrivals string
	kill, slow, lose                                   string
	gate, steal, digest                                string
	ask                                                int
	noAsk, find, asJSON                                bool
	share                                              float64
	cfg                                                sim.Config
}

func (s *simFlags) define(f *flag.FlagSet) {
	c := &s.cfg
	f.StringVar(&s.trace, "trace", "", "file of requests; without one a built-in workload is used")
	f.StringVar(&s.workload, "workload", "chat", "built-in workload: "+strings.Join(sim.Workloads, ", "))
	f.StringVar(&s.policy, "policy", "auto,exact", "policies side by side, separated by commas")
	f.IntVar(&c.Replicas, "replicas", 16, "number of replicas")
	f.Float64Var(&c.Load, "load", 0.85, "load as a share of what the replicas take when saturated")
	f.Float64Var(&c.Rate, "rate", 0, "requests/s over the whole fleet, instead of --load")
	f.StringVar(&s.profile, "profile", "h100-8b", "engine: small, h100-8b, h100x4-70b, a10-8b, or RATE,STEP,SLOTS such as 10000,20ms,32")
	f.StringVar(&s.speeds, "speeds", "", "relative speeds of the replicas, repeated, such as 1,1,0.7,0.5")
	f.IntVar(&c.Requests, "requests", 0, "number of requests, instead of --duration")
	f.DurationVar(&c.Duration, "duration", 180*time.Second, "of the arrivals, in virtual time")
	f.DurationVar(&c.Warm, "warm", 20*time.Second, "arrivals before are not measured (at most a quarter of the run)")
	f.StringVar(&s.arrivals, "arrivals", "poisson", "poisson, gamma, or trace: the trace's own times scaled to the rate")
	f.Float64Var(&c.Arrivals.CV, "cv", 4, "coefficient of variation of gamma arrivals")
	f.DurationVar(&c.GossipAge, "gossip-age", 200*time.Millisecond, "mean age of a gossiped record")
	f.Float64Var(&c.Loss, "loss", 0, "share of gossip messages lost, 0 to 1")
	f.DurationVar(&c.DigestEvery, "digest-age", time.Second, "time between two changes of a prefix digest")
	f.DurationVar(&c.Hop, "hop", 500*time.Microsecond, "one way between two agents")
	f.DurationVar(&c.ZoneHop, "zone-hop", time.Millisecond, "one way between agents of different zones")
	f.IntVar(&c.Front, "front", 0, "number of agents that clients use; 0 = all")
	f.IntVar(&c.Zones, "zones", 1, "zones, replica by replica in turn")
	f.StringVar(&s.kill, "kill", "", "AT or AT,BACK: replica 1 dies, and comes back")
	f.StringVar(&s.lose, "lose-zone", "", "AT or AT,BACK: all replicas of a zone die")
	f.StringVar(&s.slow, "slow", "", "AT,FACTOR or AT,FACTOR,END: replica 0 is so many times slower")
	f.IntVar(&s.ask, "ask", -1, "how many replicas are asked, in any fleet; -1 = all of up to 16, three of more")
	f.BoolVar(&s.noAsk, "no-ask", false, "the same as --ask 0")
	f.StringVar(&s.gate, "gate", "on", "on or off: agents hold back what their engine could not start")
	f.StringVar(&s.steal, "steal", "on", "on or off: idle agents pull held requests")
	f.StringVar(&s.digest, "digest", "on", "on or off: agents tell what their engines have cached")
	f.DurationVar(&c.SLO.TTFT, "slo-ttft", 2*time.Second, "longest good time to first token")
	f.DurationVar(&c.SLO.PerToken, "slo-per-token", 50*time.Millisecond, "longest good mean time per further token")
	f.Float64Var(&s.share, "slo-share", 0.99, "share of the requests that must be good, with --find-replicas")
	f.BoolVar(&s.find, "find-replicas", false, "find the smallest number of replicas that keeps the SLO at --rate, for the first policy")
	f.Uint64Var(&c.Seed, "seed", 1, "of arrivals and draws")
	f.BoolVar(&s.asJSON, "json", false, "print one JSON object and nothing else")
}

// config reads what is not plain numbers.
func (s *simFlags) config() (sim.Config, error) {
	c := s.cfg
	var err error
	if s.trace != "" {
		c.Trace, err = sim.ReadTraceFile(s.trace)
	} else {
		c.Trace, err = sim.Workload(s.workload)
	}
	if err != nil {
		return c, err
	}
	if c.Engine, err = sim.Profile(s.profile); err != nil {
		return c, err
	}
	for _, v := range strings.Split(s.speeds, ",") {
		if v == "" {
			continue
		}
		x, err := strconv.ParseFloat(v, 64)
		if err != nil {
			return c, fmt.Errorf("--speeds %q: %w", s.speeds, err)
		}
		c.Speeds = append(c.Speeds, x)
	}
	c.Arrivals.Mode = s.arrivals
	switch {
	case s.noAsk:
		c.Ask = new(0)
	case s.ask >= 0:
		c.Ask = new(s.ask)
	}
	for _, x := range []struct {
		name, value string
		to          *sim.Switch
	}{{"gate", s.gate, &c.Gate}, {"steal", s.steal, &c.Steal}, {"digest", s.digest, &c.Digest}} {
		switch x.value {
		case "on", "auto":
		case "off":
			*x.to = sim.Off
		default:
			return c, fmt.Errorf("--%s %q: on or off", x.name, x.value)
		}
	}
	if c.Kill, err = outage("kill", s.kill); err != nil {
		return c, err
	}
	if c.LoseZone, err = outage("lose-zone", s.lose); err != nil {
		return c, err
	}
	if s.slow != "" {
		p := strings.Split(s.slow, ",")
		if len(p) < 2 || len(p) > 3 {
			return c, fmt.Errorf("--slow %q: AT,FACTOR or AT,FACTOR,END", s.slow)
		}
		c.Slow.At, err = time.ParseDuration(p[0])
		if err == nil {
			c.Slow.Factor, err = strconv.ParseFloat(p[1], 64)
		}
		if err == nil && len(p) == 3 {
			c.Slow.End, err = time.ParseDuration(p[2])
		}
		if err != nil {
			return c, fmt.Errorf("--slow %q: %w", s.slow, err)
		}
	}
	return c, nil
}

func outage(name, v string) (o sim.Outage, err error) {
	if v == "" {
		return o, nil
	}
	at, back, two := strings.Cut(v, ",")
	o.At, err = time.ParseDuration(at)
	if err == nil && two {
		o.Back, err = time.ParseDuration(back)
	}
	if err == nil && (o.At <= 0 || two && o.Back <= o.At) {
		err = fmt.Errorf("must be AT or AT,BACK, above 0 and growing")
	}
	if err != nil {
		err = fmt.Errorf("--%s %q: %w", name, v, err)
	}
	return o, err
}

// runSim simulates a fleet.
func runSim(ctx context.Context, p *process, args []string) error {
	f := p.flags("sim")
	var s simFlags
	s.define(f)
	f.Usage = func() {
		fmt.Fprintf(f.Output(), simHelp, simExample1, simExample2)
		f.PrintDefaults()
	}
	if err := p.parse(f, args); err != nil {
		return err
	}
	cfg, err := s.config()
	policies := strings.Split(s.policy, ",")
	for _, name := range policies {
		if err == nil {
			err = sim.ParsePolicy(name)
		}
	}
	if s.find && err == nil && !(cfg.Rate > 0) {
		err = fmt.Errorf("--find-replicas needs --rate")
	}
	if err != nil {
		return fmt.Errorf("grapevine sim: %w: %w", err, errUsage)
	}
	if p.terminal && !s.asJSON {
		b := &simBar{w: p.err}
		cfg.Progress = b.show
		defer b.clear()
	}
	ctx, stop := untilSignal(ctx, p)
	defer stop()
	if s.find {
		cfg.Policy = policies[0]
		return s.findReplicas(ctx, p, cfg)
	}
	cfg.Capacity = sim.Capacity(cfg.Engine, cfg.Trace)
	var all []sim.Result
	for _, name := range policies {
		cfg.Policy = name
		r, err := sim.Run(ctx, cfg)
		if err != nil {
			return err
		}
		all = append(all, r)
	}
	if s.asJSON {
		return json.NewEncoder(p.out).Encode(map[string]any{"capacity": cfg.Capacity, "results": all})
	}
	if cfg.Progress != nil {
		cfg.Progress(0, 0)
	}
	prompt, output := cfg.Trace.Means()
	r := all[0]
	fmt.Fprintf(p.out, "%s: %.0f tokens in, %.0f out on average; one saturated replica takes %.2f requests/s\n%d replicas, %.1f requests/s, load %.2f, %d requests measured\n\n",
		r.Trace, prompt, output, cfg.Capacity, r.Replicas, r.Rate, r.Load, r.Requests)
	writeResults(p.out, all)
	return nil
}

// findReplicas answers how many replicas a load needs.
func (s *simFlags) findReplicas(ctx context.Context, p *process, cfg sim.Config) error {
	x, err := sim.Find(ctx, cfg, s.share)
	if err != nil {
		return err
	}
	if s.asJSON {
		return json.NewEncoder(p.out).Encode(x)
	}
	if cfg.Progress != nil {
		cfg.Progress(0, 0)
	}
	t := table{right: []bool{true, true, true, true}}
	t.add("replicas", "good", "ttft p50", "p99")
	for _, r := range x.Tried {
		t.add(strconv.Itoa(r.Replicas), percent(r.Served), ms(r.TTFT.P50), ms(r.TTFT.P99))
	}
	t.write(p.out, plain)
	a := x.Paper
	fmt.Fprintf(p.out, "\non paper   R·L/T = %.4g requests/s · %.0f tokens / %.0f tokens/s = %.1f replicas; at 70 %% of that %d; N+1 %d", a.Rate, a.Output, a.Tokens, a.Bare, a.Headroom, a.NPlusOne)
	if a.Zones > 0 {
		fmt.Fprintf(p.out, "; to lose a zone of %d: %d", cfg.Zones, a.Zones)
	}
	if x.Replicas == 0 {
		fmt.Fprintf(p.out, "\nsimulated  no fleet of up to %d replicas keeps the SLO for %s\n", x.Tried[len(x.Tried)-1].Replicas, percent(x.Share))
		return fmt.Errorf("the SLO cannot be kept")
	}
	fmt.Fprintf(p.out, "\nsimulated  %d replicas keep first token %v and %v a token for %s of the requests\n", x.Replicas, s.cfg.SLO.TTFT, s.cfg.SLO.PerToken, percent(x.Share))
	return nil
}

// writeResults prints policies side by side.
func writeResults(w io.Writer, all []sim.Result) {
	t := table{right: []bool{false, true, true, true, true, true, true, true, true, true, true, true, true}}
	t.add("policy", "ttft mean", "p50", "p95", "p99", "per token", "goodput", "hits", "busy", "forwarded", "asked", "stolen", "failed")
	for i := range all {
		r := &all[i]
		t.add(r.Policy, ms(r.TTFT.Mean), ms(r.TTFT.P50), ms(r.TTFT.P95), ms(r.TTFT.P99), ms(r.PerToken.Mean), percent(r.Good), percent(r.HitRate),
			percent(r.Busy), percent(r.Share(r.Counts.Forwarded)), percent(r.Share(r.Counts.Asked)), percent(r.Share(r.Counts.Stolen)), strconv.Itoa(r.Counts.Failed+r.Counts.Unended))
	}
	t.write(w, plain)
	for i := range all {
		c := &all[i].Counts
		if n := c.Retried + c.Continued + c.Repeated + c.Refused; n > 0 {
			fmt.Fprintf(w, "%s: sent again before any content %d, continued elsewhere %d, repeated by clients %d, refused %d, cut off with their agent %d\n",
				all[i].Policy, c.Retried, c.Continued, c.Repeated, c.Refused, c.Cut)
		}
	}
}

func plain(_ int, cell string) string { return cell }
func percent(x float64) string        { return strconv.FormatFloat(100*x, 'f', 1, 64) + "%" }

// ms writes seconds as milliseconds.
func ms(s float64) string {
	if s >= 10 {
		return strconv.FormatFloat(s, 'f', 1, 64) + "s"
	}
	return strconv.FormatFloat(1e3*s, 'f', 1, 64) + "ms"
}

// simBar is a progress bar that appears when a run takes longer than a second.
type simBar struct {
	w     io.Writer
	start time.Time
	shown bool
}

// show draws the bar; a total of 0 takes it away.
func (b *simBar) show(done, total int) {
	if b.start.IsZero() {
		b.start = time.Now()
	}
	switch {
	case total == 0:
		b.clear()
	case done >= total:
		b.clear()
		b.start = time.Time{}
	case time.Since(b.start) > time.Second:
		const width = 40
		n := width * done / total
		left := time.Duration(float64(time.Since(b.start)) * float64(total-done) / float64(max(1, done))).Round(time.Second)
		fmt.Fprintf(b.w, "\r[%s%s] %3d %%  %v left \x1b[K", strings.Repeat("#", n), strings.Repeat(" ", width-n), 100*done/total, left)
		b.shown = true
	}
}

func (b *simBar) clear() {
	if b.shown {
		fmt.Fprint(b.w, "\r\x1b[K")
		b.shown = false
	}
}
