package agent

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
	dto "github.com/prometheus/client_model/go"
)

// typicalPrompt is the prompt, in tokens, for which status predicts the time to the first token.
const typicalPrompt = 1000

// Status returns what GET /status shows. Before Run has opened the listeners most of it is empty.
func (a *Agent) Status() Status {
	now := time.Now()
	s := Status{
		Node: a.member.Node, Boot: bootText(a.boot), Version: Version(), Cluster: a.cfg.Cluster, Zone: a.cfg.Zone, Policy: a.policy.Name(),
		UptimeMS: now.Sub(a.started).Milliseconds(), Peers: []PeerStatus{}, Warnings: []string{}, Picks: PicksStatus{ByReason: map[string]uint64{}}, Process: a.opts.processStatus(),
		Listen: a.Addresses(),
	}
	a.own.mu.Lock()
	s.State = a.own.facts.state().String()
	s.Ready, s.Why = a.own.facts.ready()
	if s.Ready && a.own.facts.suspect {
		s.State, s.Why = routing.StateSuspect.String(), MsgSuspect
	}
	if since := a.own.since; !since.IsZero() {
		s.SinceMS = now.Sub(since).Milliseconds()
	}
	s.Engine = a.engineStatus(now)
	s.GPU = a.own.gpuStatus()
	a.own.mu.Unlock()
	if s.Listen == (ListenStatus{}) {
		return s
	}
	l := a.proxy.Load()
	s.Load = LoadStatus{Running: l.Running + l.Waiting, PendingTokens: l.PendingTokens, Accepted: l.Accepted, PrefillRate: l.PrefillRate}
	if l.DecodeStep.OK {
		s.Load.DecodeStepMS = routing.Some(float64(l.DecodeStep.V) / float64(time.Millisecond))
	}
	for _, m := range a.proxy.Learned() {
		s.Engine.Learned = append(s.Engine.Learned, ModelLearned{Model: m.Model, Answers: m.Answers, BytesPerToken: m.BytesPerToken,
			OutputP50: m.OutputP50, OutputP90: m.OutputP90})
	}
	s.Queue = QueueStatus{Held: l.Held, HeldTokens: l.HeldTokens}
	s.Picks = a.picksStatus()
	s.Mode, s.Shadow = a.shadowStatus()
	s.Peers = a.peersStatus(now)
	s.Gossip = a.gossipStatus(now)
	s.Warnings = a.warningList(s.Gossip)
	return s
}

// engineStatus is called with the lock of own held.
func (a *Agent) engineStatus(now time.Time) EngineStatus {
	o := &a.own
	s := EngineStatus{
		Kind: string(a.engine.Kind()), Version: a.engine.Version(), URL: redactURL(a.cfg.EngineURL), Health: o.health.State.String(), Detail: o.health.Detail,
		Models: modelIDs(o.models), Running: o.reading.Running, Waiting: o.reading.Waiting, RunLimit: o.reading.RunLimit,
		KVUsage: o.reading.KVUsed, KVCapacity: o.reading.KVCapacity,
	}
	if !o.reading.At.IsZero() {
		s.AgeMS = routing.Some(now.Sub(o.reading.At).Milliseconds())
	}
	if o.readError != nil {
		s.Error = o.readError.Error()
	}
	s.Evidence, s.Serves, s.Asleep, s.Outside, s.Restarts = a.engine.Evidence(), servesNames(o.serves), o.reading.Asleep.V, o.foreign, o.restarts
	s.Readings = readingsStatus(&o.reading, s.Error, now)
	s.Learned = []ModelLearned{}
	return s
}

func (a *Agent) picksStatus() PicksStatus {
	m := a.proxy.Metrics()
	s := PicksStatus{Forwarded: m.AttemptsPeer, ByReason: map[string]uint64{}}
	for _, n := range m.EntryByOutcome {
		s.Total += n
	}
	for _, n := range m.Retries {
		s.Retries += n
	}
	for reason, n := range m.Refusals {
		if n > 0 {
			s.ByReason[reason] = n
			s.Failed += n
		}
	}
	return s
}

// peersStatus lists all replicas, the own one first, then by name.
func (a *Agent) peersStatus(now time.Time) []PeerStatus {
	var out []PeerStatus
	for _, p := range a.table.Snapshot().Peers() {
		out = append(out, a.peerStatus(p, now))
	}
	slices.SortFunc(out, func(x, y PeerStatus) int {
		if x.Self != y.Self {
			return map[bool]int{true: -1, false: 1}[x.Self]
		}
		return strings.Compare(x.Node, y.Node)
	})
	return out
}

func (a *Agent) peerStatus(p *routing.Peer, now time.Time) PeerStatus {
	m := p.Member()
	r, at := p.Report()
	s := PeerStatus{
		Node: m.Node, Boot: bootText(m.Boot), Address: m.Addr, Zone: m.Zone, Engine: m.Engine, Self: p.Self(), State: r.State.String(),
		Flags: flagNames(r.Flags), Models: []string{}, Running: r.Running, Waiting: r.Waiting, Held: r.Held, KVUsage: r.KVUsed,
		GPUMemoryUsage: r.GPUMemoryUsed, PendingTokens: r.PendingTokens, PrefillRate: r.PrefillRate, InflightFromHere: p.Inflight(),
	}
	if s.Self {
		s.Engine = string(a.engine.Kind())
	}
	if age := p.Age(now); !at.IsZero() && age.OK {
		s.AgeMS = routing.Some(age.V.Milliseconds())
	}
	if models, _, ok := p.Models(); ok {
		for _, m := range models {
			s.Models = append(s.Models, m.ID)
		}
	}
	if !s.Self { // what this agent makes of it, not only what it says
		h := p.Health(now)
		s.State, s.Why, s.SinceMS = h.State.String(), h.Why, max(0, now.Sub(h.Since).Milliseconds())
		if !h.EjectedUntil.IsZero() {
			s.EjectedUntilMS = routing.Some(h.EjectedUntil.Sub(now).Milliseconds())
		}
	}
	if r.PrefillRate.OK && r.PrefillRate.V > 0 {
		s.PredictedTTFTMS = routing.Some(math.Round(1000 * float64(r.PendingTokens.Or(0)+r.HeldTokens.Or(0)+typicalPrompt) / r.PrefillRate.V))
	}
	return s
}

var flagWords = []struct {
	flag routing.Flags
	word string
}{
	{routing.FlagDraining, "draining"}, {routing.FlagSaturated, "saturated"}, {routing.FlagEngineDown, "engine down"}, {routing.FlagStale, "metrics stale"},
	{routing.FlagGPUTrouble, "GPU trouble"}, {routing.FlagWarming, "warming up"}, {routing.FlagSuspect, "suspect"}, {routing.FlagShadow, "shadow mode"},
}

func flagNames(f routing.Flags) []string {
	out := []string{}
	for _, w := range flagWords {
		if f&w.flag != 0 {
			out = append(out, w.word)
		}
	}
	return out
}

func (a *Agent) gossipStatus(now time.Time) GossipStatus {
	st := a.node.Stats()
	s := GossipStatus{Members: st.Members, HealthScore: st.HealthScore, Sent: st.RecordsSent, Received: st.RecordsHeard, Unreachable: st.Unreachable, Encrypted: st.Keyed, Strangers: st.Strangers}
	for _, n := range st.Dropped {
		s.Dropped += n
	}
	if ages := a.reportAges(now); len(ages) > 0 {
		s.ReportAgeP50MS = routing.Some(float64(ages[len(ages)/2]) / float64(time.Millisecond))
		s.ReportAgeMaxMS = routing.Some(float64(ages[len(ages)-1]) / float64(time.Millisecond))
	}
	return s
}

// reportAges are the ages of the other members' newest records, ascending.
func (a *Agent) reportAges(now time.Time) []time.Duration {
	var ages []time.Duration
	for _, p := range a.table.Snapshot().Peers() {
		if age := p.Age(now); !p.Self() && age.OK {
			ages = append(ages, age.V)
		}
	}
	slices.Sort(ages)
	return ages
}

// warningList joins the standing warnings with those that others know.
func (a *Agent) warningList(g GossipStatus) []string {
	a.mu.Lock()
	out := slices.Collect(maps.Values(a.warnings))
	a.mu.Unlock()
	for _, u := range g.Unreachable {
		out = append(out, "join address unreachable: "+u)
	}
	slices.Sort(out)
	return append([]string{}, out...)
}

// collect adds all metrics to g.
func (a *Agent) collect(g *gathering) {
	now := time.Now()
	s := a.Status()
	g.add(MetricBuildInfo, 1, Version(), runtime.Version())
	g.add(MetricStartTime, float64(a.started.UnixMilli())/1000)
	g.add(MetricReady, bit(s.Ready))
	for _, st := range []routing.State{routing.StateStarting, routing.StateWarming, routing.StateReady, routing.StateAsleep, routing.StateDraining, routing.StateSuspect} {
		g.add(MetricState, bit(s.State == st.String()), st.String())
	}
	g.add(MetricWarnings, float64(len(s.Warnings)))
	a.own.mu.Lock()
	up, reads, readErrors, restarts := a.own.facts.engineUp, a.own.reads, a.own.readErrors, a.own.restarts
	a.own.mu.Unlock()
	g.add(MetricEngineUp, bit(up))
	addInt(g, MetricEngineRunning, s.Engine.Running)
	addInt(g, MetricEngineWaiting, s.Engine.Waiting)
	if s.Engine.KVUsage.OK {
		g.add(MetricEngineKVUsage, s.Engine.KVUsage.V)
	}
	addInt(g, MetricEngineKVCapacity, s.Engine.KVCapacity)
	g.add(MetricEngineReadings, float64(reads-readErrors), "ok")
	g.add(MetricEngineReadings, float64(readErrors), "error")
	g.add(MetricEngineRestarts, float64(restarts))
	g.add(MetricEngineOutside, float64(s.Engine.Outside))
	g.add(MetricEngineAsleep, bit(s.Engine.Asleep))
	if s.Engine.AgeMS.OK {
		g.add(MetricEngineReadingAge, float64(s.Engine.AgeMS.V)/1000)
	}
	collectGPU(g, &s.GPU)
	if s.GPU.MemoryTotal.OK {
		g.add(MetricGPUMemoryUsed, float64(s.GPU.MemoryUsed.V))
		g.add(MetricGPUMemoryTotal, float64(s.GPU.MemoryTotal.V))
	}
	g.add(MetricInflight, float64(s.Load.Running))
	g.add(MetricPendingTokens, float64(s.Load.PendingTokens))
	g.add(MetricHeld, float64(s.Queue.Held))
	g.add(MetricAccepted, float64(s.Load.Accepted))
	a.collectProxy(g)
	a.collectShadow(g)
	a.collectTraces(g)
	states := map[string]int{}
	for i, p := range s.Peers {
		states[p.State]++
		if i < maxPeerSeries {
			g.add(MetricPeerInflight, float64(p.InflightFromHere), p.Node)
		}
	}
	for _, st := range slices.Sorted(maps.Keys(states)) {
		g.add(MetricPeers, float64(states[st]), st)
	}
	if ages := a.reportAges(now); len(ages) > 0 {
		g.add(MetricReportAge, ages[len(ages)/2].Seconds(), "0.5")
		g.add(MetricReportAge, ages[len(ages)-1].Seconds(), "1")
	}
	g.add(MetricGossipMembers, float64(s.Gossip.Members))
	g.add(MetricGossipHealth, float64(s.Gossip.HealthScore))
	g.add(MetricGossipRecords, float64(s.Gossip.Sent), "sent")
	g.add(MetricGossipRecords, float64(s.Gossip.Received), "received")
	g.add(MetricGossipRecords, float64(s.Gossip.Dropped), "dropped")
	g.add(MetricStrangers, float64(s.Gossip.Strangers), "gossip")
	g.add(MetricStrangers, float64(a.strangers.peer.Load()), "peer")
	g.add(MetricStrangers, float64(a.strangers.status.Load()), "status")
}

// maxPeerSeries bounds the series with a peer's name.
const maxPeerSeries = 128

func addInt(g *gathering, name string, x routing.Opt[int], labels ...string) {
	if x.OK {
		g.add(name, float64(x.V), labels...)
	}
}

func (a *Agent) collectProxy(g *gathering) {
	m := a.proxy.Metrics()
	labelled := func(name string, counts map[string]uint64, labels ...string) {
		for _, k := range slices.Sorted(maps.Keys(counts)) {
			g.add(name, float64(counts[k]), append(labels, k)...)
		}
	}
	labelled(MetricRequests, m.EntryByOutcome, "entry")
	labelled(MetricRequests, m.TargetByOutcome, "target")
	labelled(MetricRetries, m.Retries)
	for labels, n := range m.Continues {
		reason, outcome, _ := strings.Cut(labels, " ")
		g.add(MetricContinues, float64(n), reason, outcome)
	}
	labelled(MetricRefusals, m.Refusals)
	g.add(MetricAttempts, float64(m.AttemptsSelf), "self")
	g.add(MetricAttempts, float64(m.AttemptsPeer), "peer")
	g.add(MetricReplays, float64(m.Replays))
	g.add(MetricNoModel, float64(m.NoModel))
	g.add(MetricBytesOut, float64(m.BytesOut))
	g.add(MetricTokens, float64(m.PromptTokens), "prompt")
	g.add(MetricTokens, float64(m.CachedTokens), "cached")
	g.add(MetricTokens, float64(m.OutputTokens), "output")
	g.add(MetricRetryBudget, m.RetryBudget)
	g.add(MetricRetryExhausted, float64(m.RetryBudgetExhausted))
	g.add(MetricBodyBytes, float64(m.BodyBytes))
	g.add(MetricPulls, float64(m.Steal.Given), "given")
	g.add(MetricPulls, float64(m.Steal.None), "none")
	g.add(MetricPulls, float64(m.Steal.Failed), "failed")
	g.add(MetricPulls, float64(m.Steal.Came), "came")
	g.add(MetricMoved, float64(m.Steal.Moved))
	g.add(MetricHeldTokens, float64(m.Gate.HeldTokens))
	for outcome, n := range map[string]uint64{"passed": m.Gate.Passed, "held": m.Gate.Held, "full": m.Gate.Full, "shed": m.Gate.Shed, "timeout": m.Gate.TimedOut,
		"drained": m.Gate.Drained, "stolen": m.Gate.Stolen} {
		g.add(MetricGate, float64(n), outcome)
	}
	g.add(MetricAsks, float64(m.Ask.Answered-m.Ask.Refused), "answered")
	g.add(MetricAsks, float64(m.Ask.Refused), "refused")
	g.add(MetricAsks, float64(m.Ask.Missed), "missed")
	g.add(MetricAsks, float64(m.Ask.Given), "given")
	g.add(MetricAskedRequests, float64(m.Ask.Requests-m.Ask.Changed), "kept")
	g.add(MetricAskedRequests, float64(m.Ask.Changed), "changed")
	g.add(MetricAskedRequests, float64(m.Ask.Turned), "turned")
	for _, h := range []struct {
		name string
		h    proxy.Histogram
	}{{MetricTTFT, m.TTFT}, {MetricDuration, m.Duration}, {MetricAsking, m.Ask.Took}, {MetricHeldFor, m.Gate.Waited}} {
		_, d := g.family(h.name, nil)
		d.Histogram = protoHistogram(h.h)
	}
}

// protoHistogram makes the counts cumulative, as Prometheus wants them.
func protoHistogram(h proxy.Histogram) *dto.Histogram {
	out := &dto.Histogram{SampleSum: new(h.Sum)}
	var n uint64
	for i, b := range h.Bounds {
		n += h.Counts[i]
		out.Bucket = append(out.Bucket, &dto.Bucket{UpperBound: new(b), CumulativeCount: new(n)})
	}
	n += h.Counts[len(h.Bounds)]
	out.SampleCount = new(n)
	return out
}

// console wires the status listener to the agent.
func (a *Agent) console() *console {
	get := func(path func() string) func(context.Context) (*http.Response, error) {
		return func(ctx context.Context) (*http.Response, error) {
			base := a.cfg.engineURL()
			u := path()
			if !strings.Contains(u, "://") {
				if base.Scheme == "unix" {
					u = "http://engine" + u
				} else {
					u = strings.TrimSuffix(base.String(), "/") + u
				}
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
			if err != nil {
				return nil, err
			}
			if a.cfg.EngineAPIKey != "" {
				req.Header.Set("Authorization", "Bearer "+a.cfg.EngineAPIKey)
			}
			return a.client.Do(req)
		}
	}
	return &console{
		status: a.Status, metrics: a.collect, alive: a.alive, drain: a.Drain, drained: a.drained, explain: a.explain, mode: a.SetMode, refused: a.strangers.atStatus, token: a.cfg.StatusToken, every: time.Second, flight: &a.flight,
		keys: func() any { return a.node.Keys() }, changeKeys: a.changeKeys, allKeys: a.allKeys,
		ready: func(entry bool) (bool, string) {
			if entry {
				return a.entryReady()
			}
			return a.Ready()
		},
		picks:  func(id string) any { return append([]proxy.PickRecord{}, a.proxy.Picks(id)...) },
		health: get(a.engine.HealthPath),
		scrape: get(func() string {
			if u := a.cfg.EngineMetricsURL; u != "" && u != "off" {
				return u
			}
			return "/metrics"
		}),
	}
}

// standstill is how long the report loop may take for one turn before /livez fails and the agent is restarted.
const standstill = 30 * time.Second

func (a *Agent) alive() error {
	beat := a.beat.Load()
	if d := time.Since(time.Unix(0, beat)); beat != 0 && d > standstill {
		return fmt.Errorf("report loop stands still for %s", d.Round(time.Second))
	}
	return nil
}
