package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// Config says what to show.
type Config struct {
	Replicas int           // at least 1
	Slow     float64       // speed of the last replica relative to the others, above 0; 1 = all equal
	Duration time.Duration // of both halves together
	Seed     uint64
	Policy   string       // of the agents; "" = auto
	Out      io.Writer    // progress for people; nil = none
	Terminal bool         // Out may be redrawn
	Logger   *slog.Logger // of the agents
}

// load is the share of the fleet's capacity that arrives.
const load = 0.8

// TTFT are times to the first token, in ms.
type TTFT struct {
	Mean float64 `json:"ttft_mean_ms"`
	P50  float64 `json:"ttft_p50_ms"`
	P99  float64 `json:"ttft_p99_ms"`
}

// Result is the summary; its names are a contract.
type Result struct {
	Replicas       int     `json:"replicas"`
	Requests       int     `json:"requests"` // of both halves
	Errors         int     `json:"errors"`   // of both halves
	ForwardedShare float64 `json:"forwarded_share"`
	TTFT
	RoundRobin   TTFT     `json:"round_robin"`
	Members      int      `json:"members"` // least that any agent saw
	ReportAgeP50 float64  `json:"report_age_p50_ms"`
	StatusURLs   []string `json:"status_urls"`
}

// Run plays both halves. It fails if something could not be started or ctx ended; failed requests are counted in the
// Result and make no error.
func Run(ctx context.Context, cfg Config) (Result, error) {
	if cfg.Replicas < 1 || !(cfg.Slow > 0) || math.IsInf(cfg.Slow, 0) || cfg.Duration <= 0 {
		return Result{}, errors.New("demo: replicas, slow and duration must be above zero")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	params := make([]enginesim.Params, cfg.Replicas)
	total := 0.0
	for i := range params {
		params[i] = enginesim.DefaultParams()
		if i == len(params)-1 && len(params) > 1 {
			params[i].Speed = cfg.Slow
		}
		total += capacity(params[i], cfg.Seed)
	}
	list := arrivals(cfg.Seed, load*total, cfg.Duration/2, cfg.Replicas)
	d := &show{cfg: cfg, total: total, planned: len(list)}
	res := Result{Replicas: cfg.Replicas, StatusURLs: []string{}}
	stop, err := d.grapevine(ctx, params, list, &res)
	// Leaving takes the agents some seconds, in which they have nothing to do: the second half need not wait.
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }() // owned: received below
	defer func() { <-stopped }()
	if err != nil {
		return res, err
	}
	if err := d.roundRobin(ctx, params, list, &res); err != nil {
		return res, err
	}
	d.summary(res)
	return res, ctx.Err()
}

// show is one demo under way.
type show struct {
	cfg     Config
	total   float64 // capacity of the fleet, requests/s
	planned int     // requests in each half
	lastErr error
}

// grapevine plays the first half. stop ends what it started; it is never nil.
func (d *show) grapevine(ctx context.Context, params []enginesim.Params, list []arrival, res *Result) (stop func(), err error) {
	d.printf("%d replicas (the last one at %g of the others' speed), %.0f requests/s measured capacity, %.0f requests/s arrive\n",
		d.cfg.Replicas, params[len(params)-1].Speed, d.total, load*d.total)
	e, err := startEngines(params)
	if err != nil {
		return func() {}, err
	}
	f, err := startFleet(ctx, e.urls, d.cfg)
	if err != nil {
		return e.stop, err
	}
	stop = func() { f.stop(); e.stop() }
	clients := make([]string, len(f.agents))
	for i, a := range f.agents {
		clients[i] = "http://" + a.Addresses().Client
		res.StatusURLs = append(res.StatusURLs, "http://"+a.Addresses().Status+"/")
	}
	d.printf("page of the first agent: %s\n", res.StatusURLs[0])

	var r results
	watch, done := context.WithCancel(ctx)
	var ages []int64
	var wg sync.WaitGroup
	wg.Go(func() { ages = d.follow(watch, f, &r) })
	play(ctx, list, func(_ int, a arrival) string { return clients[a.entry] }, &r)
	done()
	wg.Wait()

	var entered, forwarded uint64
	res.Members = len(f.agents)
	for _, a := range f.agents {
		s := a.Status()
		d.printf("%s answered %d requests, prefill %s tokens/s\n", s.Node, s.Load.Accepted, cell(s.Load.PrefillRate, "%.0f"))
		entered, forwarded = entered+s.Picks.Total, forwarded+s.Picks.Forwarded
		res.Members = min(res.Members, s.Gossip.Members)
	}
	if entered > 0 {
		res.ForwardedShare = math.Round(1000*float64(forwarded)/float64(entered)) / 1000
	}
	if len(ages) > 0 {
		slices.Sort(ages)
		res.ReportAgeP50 = float64(ages[len(ages)/2])
	}
	d.count(&r, res)
	res.Mean, res.P50, res.P99 = r.summary()
	if err := f.failure(); err != nil {
		return stop, err
	}
	return stop, ctx.Err()
}

// roundRobin plays the second half: the same arrivals, in turn to fresh engines.
func (d *show) roundRobin(ctx context.Context, params []enginesim.Params, list []arrival, res *Result) error {
	d.printf("\nthe same arrivals by round robin, straight to fresh engines …\n")
	e, err := startEngines(params)
	if err != nil {
		return err
	}
	defer e.stop()
	var r results
	play(ctx, list, func(i int, _ arrival) string { return e.urls[i%len(e.urls)] }, &r)
	d.count(&r, res)
	res.RoundRobin.Mean, res.RoundRobin.P50, res.RoundRobin.P99 = r.summary()
	return ctx.Err()
}

func (d *show) count(r *results, res *Result) {
	sent, _, failed := r.counts()
	res.Requests += sent
	res.Errors += failed
	if r.last != nil {
		d.lastErr = r.last
	}
}

// follow samples the ages of the records, in ms, and draws the fleet, until ctx ends.
func (d *show) follow(ctx context.Context, f *fleet, r *results) (ages []int64) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	drawn := 0
	for n := 0; ; n++ {
		for _, a := range f.agents {
			for _, p := range a.Status().Peers {
				if !p.Self && p.AgeMS.OK {
					ages = append(ages, p.AgeMS.V)
				}
			}
		}
		if n%5 == 0 {
			drawn = d.draw(f, r, drawn)
		}
		select {
		case <-ctx.Done():
			d.draw(f, r, drawn)
			return ages
		case <-tick.C:
		}
	}
}

func (d *show) printf(format string, args ...any) {
	if d.cfg.Out != nil {
		fmt.Fprintf(d.cfg.Out, format, args...)
	}
}
