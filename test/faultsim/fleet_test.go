package faultsim

import (
	"context"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
)

const (
	model      = "sim"
	key        = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
	drainFor   = 6 * time.Second
	firstByte  = 6 * time.Second
	idle       = 4 * time.Second
	queueFor   = 5 * time.Second
	clientHost = "10.0.3.1"
)

// host is one replica's machine: its agent, which comes and goes, and its engine.
type host struct {
	f        *fleet
	i        int
	ip       string
	engineIP string
	engine   *enginesim.Server
	turn     chan struct{} // held by whoever stops and starts the agent

	mu     sync.Mutex
	agent  *agent.Agent // nil = none runs
	gossip *gossiptest.Transport
	cancel context.CancelFunc
	ended  chan error
	killed bool
	starts int
}

// fleet is what a plan runs on.
type fleet struct {
	t       *testing.T
	p       *plan
	net     *network
	gossip  *gossiptest.Network
	hosts   []*host
	twin    *enginesim.Server // says what an answer would have been
	start   time.Time
	engines context.CancelFunc
	wg      sync.WaitGroup

	mu       sync.Mutex
	trace    []string
	bad      []string
	isolated map[int]int // hosts cut off from all others
	noise    []disturbance
	injected map[string]int
	longest  map[string]time.Duration
}

// disturbance is a time in which a host's network did not work.
type disturbance struct {
	from, to time.Time
	host     int
	kind     string
}

func params() enginesim.Params {
	p := enginesim.Rates(3000, 40*time.Millisecond, 2)
	p.KVTokens = 12000
	return p
}

func newFleet(t *testing.T, p *plan) *fleet {
	f := &fleet{t: t, p: p, net: newNetwork(), gossip: gossiptest.New(p.seed), start: time.Now(), isolated: map[int]int{}, injected: map[string]int{}, longest: map[string]time.Duration{}}
	f.gossip.SetDelay(200*time.Microsecond, 2*time.Millisecond)
	f.gossip.SetLoss(p.loss)
	ctx, cancel := context.WithCancel(context.Background())
	f.engines = cancel
	for i := range p.agents {
		h := &host{f: f, i: i, ip: fmt.Sprintf("10.0.1.%d", i+1), engineIP: fmt.Sprintf("10.0.2.%d", i+1), turn: make(chan struct{}, 1)}
		s, err := enginesim.NewServer(enginesim.ServerConfig{Params: params(), Dialect: p.dialect, Model: model, Seed: 7, Listen: f.net.listen, OnDie: h.died})
		if err != nil {
			t.Fatal(err)
		}
		h.engine = s
		if p.deadly {
			_ = s.Inject(enginesim.Fault{Kind: "deadly", Marker: deadlyMark})
		}
		f.wg.Go(func() { _ = s.Run(ctx) })
		f.wg.Go(func() { _ = s.ListenAndServe(ctx, "tcp", h.engineIP+":8000", nil) })
		f.hosts = append(f.hosts, h)
	}
	quick := params()
	quick.Speed, quick.Slots, quick.KVTokens = 1e4, 8, 1<<20
	quick.Budget = 4096
	twin, err := enginesim.NewServer(enginesim.ServerConfig{Params: quick, Dialect: p.dialect, Model: model, Seed: 7})
	if err != nil {
		t.Fatal(err)
	}
	f.twin = twin
	f.wg.Go(func() { _ = twin.Run(ctx) })
	for _, h := range f.hosts {
		h.launch()
	}
	return f
}

// died brings the engine back after a while, whatever it died of.
func (h *host) died() {
	time.AfterFunc(3*time.Second, func() {
		h.f.say("engine %d is back", h.i)
		h.engine.Revive()
	})
}

// say puts a line into the trace.
func (f *fleet) say(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.trace = append(f.trace, fmt.Sprintf("%9.3f  ", time.Since(f.start).Seconds())+fmt.Sprintf(format, args...))
}

// violation notes that an invariant does not hold.
func (f *fleet) violation(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	f.say("VIOLATION %s", s)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bad = append(f.bad, s)
}

// config is the agent's configuration on a host.
func (h *host) config() agent.Config {
	c := agent.DefaultConfig()
	c.Listen, c.PeerListen, c.StatusListen, c.GossipListen = h.ip+":8080", h.ip+":8081", h.ip+":8082", h.ip+":7946"
	c.Advertise, c.NodeName = h.ip, fmt.Sprintf("h%d", h.i)
	c.EngineURL, c.EngineKind, c.GPUDevices = "http://"+h.engineIP+":8000", h.f.p.dialect, "none"
	c.Policy, c.TrustPriority = h.f.p.policy, true
	c.Insecure = !h.f.p.keyed
	if h.f.p.keyed {
		c.GossipKey = key
	}
	c.FirstByteTimeout, c.IdleTimeout, c.QueueTimeout, c.DrainTimeout = firstByte, idle, queueFor, drainFor
	for j := range h.f.p.agents {
		if j != h.i {
			c.Join = append(c.Join, fmt.Sprintf("10.0.1.%d:7946", j+1))
		}
	}
	return c
}

// launch starts the host's agent.
func (h *host) launch() {
	h.f.net.up(h.ip)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.starts++
	tr := h.f.gossip.ListenAt(h.ip + ":7946")
	a, err := agent.New(h.config(), agent.Options{Seed: h.f.p.seed<<16 | uint64(h.i)<<8 | uint64(h.starts), Transport: tr,
		Listen: h.f.net.listen, Dial: h.f.net.dialFrom(h.ip), Logger: slog.New(&traceLog{f: h.f, who: fmt.Sprintf("h%d", h.i)})})
	if err != nil {
		h.f.violation("agent %d cannot be made: %v", h.i, err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	h.agent, h.gossip, h.cancel, h.ended, h.killed = a, tr, cancel, ended, false
	h.f.wg.Go(func() { ended <- a.Run(ctx) })
}

// stop ends the host's agent: by a drain, or at once as kill -9 does. It waits for its end, and looks at what it still
// counts then.
func (h *host) stop(kill bool) {
	h.mu.Lock()
	a, tr, cancel, ended := h.agent, h.gossip, h.cancel, h.ended
	h.agent, h.killed = nil, kill
	h.mu.Unlock()
	if a == nil {
		return
	}
	began := time.Now()
	if kill {
		h.f.net.down(h.ip)
		_ = tr.Shutdown()
	}
	cancel()
	limit := time.NewTimer(drainFor + 20*time.Second)
	defer limit.Stop()
	select {
	case err := <-ended:
		if !kill {
			_ = tr.Shutdown()
			h.f.net.down(h.ip)
			if err != nil {
				h.f.violation("agent %d: Run after a drain: %v", h.i, err)
			}
		}
		h.f.say("agent %d has ended after %v", h.i, time.Since(began).Round(time.Millisecond))
	case <-limit.C:
		h.f.violation("agent %d does not end within %v of a stop (kill %v); left: %v", h.i, time.Since(began), kill, a.Leftovers())
		<-ended
	}
	time.Sleep(50 * time.Millisecond)
	for _, l := range a.Leftovers() {
		if !strings.HasPrefix(l, "tickets") { // they end by the clock
			h.f.violation("agent %d, stopped (kill %v): %s", h.i, kill, l)
		}
	}
}

func (h *host) running() *agent.Agent {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.agent
}

// disturb notes that a host's network does not work for so long.
func (f *fleet) disturb(host int, kind string, d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	f.noise = append(f.noise, disturbance{now, now.Add(d), host, kind})
}

// disturbed reports whether any host's network or engine misbehaved in a way that hides ends of connections.
func (f *fleet) disturbed(from, to time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.noise {
		if d.kind != "gone" && d.from.Before(to) && d.to.After(from) {
			return true
		}
	}
	return false
}

// inject carries a fault out; it returns when the fault is over.
func (f *fleet) inject(x fault) {
	h := f.hosts[x.a]
	f.say("FAULT %s", x)
	f.mu.Lock()
	f.injected[x.kind]++
	f.mu.Unlock()
	wait := func() { time.Sleep(x.dur) }
	other := f.hosts[x.b]
	switch x.kind {
	case "kill", "drain":
		h.turn <- struct{}{} // one after the other
		f.disturb(x.a, "gone", x.dur+drainFor+20*time.Second)
		h.stop(x.kind == "kill")
		wait()
		h.launch()
		<-h.turn
	case "stall":
		f.disturb(x.a, x.kind, x.dur)
		f.net.stall(h.ip, true)
		f.alone(x.a, true)
		wait()
		f.net.stall(h.ip, false)
		f.alone(x.a, false)
	case "isolate":
		f.disturb(x.a, x.kind, x.dur+keepalive)
		f.alone(x.a, true)
		for _, o := range f.hosts {
			if o != h {
				f.net.part(h.ip, o.ip, true)
			}
		}
		wait()
		for _, o := range f.hosts {
			if o != h {
				f.net.part(h.ip, o.ip, false)
			}
		}
		f.alone(x.a, false)
	case "part":
		f.disturb(x.a, x.kind, x.dur+keepalive)
		f.net.part(h.ip, other.ip, true)
		wait()
		f.net.part(h.ip, other.ip, false)
	case "half-open":
		f.disturb(x.a, x.kind, keepalive)
		f.say("  %d connections lost", f.net.lose(h.ip, other.ip))
	case "reset-peers":
		f.say("  %d connections reset", f.net.reset(h.ip, other.ip))
	case "reset-engine":
		f.say("  %d connections reset", f.net.reset(h.ip, h.engineIP))
	case "slow-peer":
		f.disturb(x.a, x.kind, x.dur+time.Second)
		f.net.delay(h.ip, other.ip, x.delay)
		wait()
		f.net.delay(h.ip, other.ip, 0)
	case "loss":
		f.gossip.SetLoss(x.share)
		wait()
		f.gossip.SetLoss(f.p.loss)
	case "no-udp":
		f.gossip.BlockUDP(h.ip+":7946", true)
		wait()
		f.gossip.BlockUDP(h.ip+":7946", false)
	case "engine-die":
		_ = h.engine.Inject(enginesim.Fault{Kind: "die"})
	default:
		kind := strings.TrimPrefix(x.kind, "engine-")
		e := enginesim.Fault{Kind: kind, Count: x.count, After: x.after, For: x.dur}
		switch kind {
		case "slow":
			e.Factor = 5
		case "hang":
			e.Pages = x.at%2 == 0
			f.disturb(x.a, x.kind, x.dur+time.Second)
		case "silence", "sleep":
			f.disturb(x.a, x.kind, x.dur+time.Second)
		}
		if err := h.engine.Inject(e); err != nil {
			f.violation("fault %s: %v", x, err)
		}
		wait()
	}
	f.say("over  %s", x)
}

// alone cuts a host's gossip off, or joins it again.
func (f *fleet) alone(host int, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.isolated[host] += step(on)
	var groups [][]string
	for i, n := range f.isolated {
		if n > 0 {
			groups = append(groups, []string{f.hosts[i].ip + ":7946"})
		}
	}
	f.gossip.Partition(groups...)
}

// expected is the text of a request's uninterrupted answer.
func (f *fleet) expected(q *request) string {
	w := httptest.NewRecorder()
	r := httptest.NewRequest("POST", q.path(), strings.NewReader(q.body(false)))
	r.Header.Set("Content-Type", "application/json")
	f.twin.ServeHTTP(w, r)
	text, err := wholeText(w.Body.Bytes(), q.chat)
	if err != nil {
		f.violation("the twin's answer: %d %v", w.Code, err)
	}
	return text
}

// traceLog puts an agent's log into the trace.
type traceLog struct {
	f   *fleet
	who string
}

var verbose bool

func (l *traceLog) Enabled(_ context.Context, v slog.Level) bool {
	return v >= slog.LevelInfo || verbose && v >= slog.LevelDebug
}

func (l *traceLog) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
		return true
	})
	l.f.say("%s %s%s", l.who, r.Message, b.String())
	return nil
}

func (l *traceLog) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *traceLog) WithGroup(string) slog.Handler      { return l }
