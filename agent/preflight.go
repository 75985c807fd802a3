package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/gpu"
)

// CheckLevel says how bad a finding of Preflight is.
type CheckLevel string

// The levels. Only a failed check keeps an agent from starting or from serving.
const (
	CheckOK   CheckLevel = "ok"
	CheckNote CheckLevel = "note" // works, but worth knowing
	CheckFail CheckLevel = "fail"
)

// Check is one finding of Preflight.
type Check struct {
	Name   string     `json:"name"` // config, engine, models, metrics, gpu, key, port, dns, peer
	Level  CheckLevel `json:"level"`
	Text   string     `json:"text"`
	Remedy string     `json:"remedy"` // what to do about it; "" when ok
}

const (
	preflightPages = 3 * time.Second // for each page of the engine
	preflightPing  = 2 * time.Second // for each address, both protocols
	preflightPeers = 32              // addresses that are tried
)

// Preflight tries out, without starting an agent, what an agent with this configuration needs: engine, GPU, ports, key,
// names and the ways to the others. It changes nothing; the others do not learn of it. The findings come in a fixed order.
func Preflight(ctx context.Context, cfg Config) []Check {
	if err := cfg.Validate(); err != nil {
		return []Check{{"config", CheckFail, err.Error(), "correct the variable; `grapevine config --docs` lists what is allowed"}}
	}
	f := &preflight{cfg: cfg}
	parts := []func(context.Context) []Check{f.config, f.engine, f.gpu, f.key, f.ports, f.peers}
	found := make([][]Check, len(parts))
	var wg sync.WaitGroup
	for i, part := range parts {
		wg.Go(func() { found[i] = part(ctx) })
	}
	wg.Wait()
	return slices.Concat(found...)
}

type preflight struct{ cfg Config }

func pass(name, format string, args ...any) []Check {
	return []Check{{name, CheckOK, fmt.Sprintf(format, args...), ""}}
}

func (f *preflight) config(context.Context) []Check {
	if len(f.cfg.Warnings) == 0 {
		return pass("config", "%d variables set, all valid", len(f.cfg.Set))
	}
	var out []Check
	for _, w := range f.cfg.Warnings {
		out = append(out, Check{"config", CheckNote, w, "`grapevine config` prints what is in effect"})
	}
	return out
}

// engine asks the engine's pages as the agent would; an engine that is down only holds back readiness.
func (f *preflight) engine(ctx context.Context) []Check {
	r := engine.New(engineConfig(&f.cfg))
	defer r.Close()
	url := redactURL(f.cfg.EngineURL)
	timed := func() (context.Context, context.CancelFunc) { return context.WithTimeout(ctx, preflightPages) }
	c, cancel := timed()
	kind, err := r.Detect(c)
	cancel()
	if err != nil {
		return []Check{{"engine", CheckFail, fmt.Sprintf("%s: %v", url, err), "start the engine, or set " + Prefix + "ENGINE_URL; an agent starts without it and waits"}}
	}
	c, cancel = timed()
	h := r.Health(c)
	cancel()
	out := []Check{{"engine", CheckOK, fmt.Sprintf("%s is %s %s (%s), %s", url, kind, r.Version(), r.Evidence(), h.State), ""}}
	if h.State != engine.Healthy {
		out[0].Level, out[0].Text, out[0].Remedy = CheckNote, out[0].Text+" "+h.Detail, "requests go to other replicas until its health page answers 200"
	}
	if kind == engine.OpenAI && f.cfg.EngineKind == string(engine.Auto) {
		out[0].Level, out[0].Remedy = CheckNote, "if it is a known engine behind a proxy, say so in "+Prefix+"ENGINE_KIND"
	}
	c, cancel = timed()
	models, err := r.Models(c)
	cancel()
	switch {
	case err != nil:
		out = append(out, Check{"models", CheckFail, err.Error(), "GET /v1/models must answer; with an API key set " + Prefix + "ENGINE_API_KEY"})
	case len(models) == 0:
		out = append(out, Check{"models", CheckFail, "the engine lists no model", "load one; requests are routed by model"})
	default:
		out = append(out, pass("models", "%s", strings.Join(modelNames(models), ", "))...)
	}
	return append(out, f.metrics(ctx, r))
}

func modelNames(models []engine.Model) (names []string) {
	for _, m := range models {
		n := m.ID
		if m.ContextLength > 0 {
			n += fmt.Sprintf(" (%d tokens)", m.ContextLength)
		}
		names = append(names, n)
	}
	return names
}

func (f *preflight) metrics(ctx context.Context, r *engine.Reader) Check {
	c, cancel := context.WithTimeout(ctx, preflightPages)
	defer cancel()
	rd, err := r.Read(c)
	if err != nil {
		return Check{"metrics", CheckNote, err.Error(), "start the engine with its metrics on, or set " + Prefix + "ENGINE_METRICS_URL; without them only what passes through the agent counts"}
	}
	var known, missing []string
	for _, x := range readingsStatus(&rd, "", time.Now()) {
		if x.Why == "" {
			known = append(known, x.Name)
		} else if slices.Contains([]string{"running", "waiting", "kv_usage"}, x.Name) {
			missing = append(missing, x.Name+": "+x.Why)
		}
	}
	if len(missing) > 0 {
		return Check{"metrics", CheckNote, "missing " + strings.Join(missing, "; "), "map them in " + Prefix + "ENGINE_METRICS, or leave them unknown"}
	}
	return Check{"metrics", CheckOK, "readable: " + strings.Join(known, ", "), ""}
}

// gpu reads the cards once.
func (f *preflight) gpu(context.Context) []Check {
	if f.cfg.GPUDevices == "none" {
		return pass("gpu", "not read, as configured")
	}
	r, err := gpu.Open(gpuConfig(&f.cfg))
	if err == nil {
		defer func() { _ = r.Close() }() // it was only read from
		var rd gpu.Reading
		if rd, err = r.Read(); err == nil && rd.Unknown == "" {
			if len(rd.Trouble) > 0 {
				return []Check{{"gpu", CheckFail, strings.Join(rd.Trouble, "; "), "others get the requests of a replica with such a card; see `nvidia-smi -q` and the kernel log"}}
			}
			return pass("gpu", "%d of them, %.1f GiB in use of %.1f GiB (%s)", len(rd.Devices), float64(rd.Memory.Used)/(1<<30), float64(rd.Memory.Total)/(1<<30), rd.Method)
		}
		if err == nil {
			err = errors.New(rd.Unknown)
		}
	}
	remedy := "fine without NVIDIA cards; else make the driver's libnvidia-ml.so.1 visible and build with cgo"
	if _, ok := errors.AsType[*gpu.Ambiguous](err); ok {
		remedy = "name the engine's cards in " + Prefix + "GPU_DEVICES"
	}
	return []Check{{"gpu", CheckNote, err.Error(), remedy}}
}

func (f *preflight) key(context.Context) []Check {
	keys, err := gossip.ParseKeys(f.cfg.GossipKey)
	switch {
	case err != nil:
		return []Check{{"key", CheckFail, err.Error(), "make one with `grapevine keygen`"}}
	case len(keys) > 0:
		ids := make([]string, 0, len(keys))
		for _, k := range keys {
			ids = append(ids, gossip.KeyID(k))
		}
		return pass("key", "id %s; the ids must be the same on all agents", strings.Join(ids, ", "))
	case isLoopback(f.cfg.GossipListen):
		return pass("key", "none, and none is needed on loopback")
	}
	return []Check{{"key", CheckNote, "none: gossip and traffic between agents are open to the network", "set " + Prefix + "GOSSIP_KEY_FILE, see `grapevine keygen`"}}
}

// ports tries to listen; a port that an agent of ours serves already is as good as a free one.
func (f *preflight) ports(ctx context.Context) []Check {
	running := f.runningAgent(ctx)
	var out []Check
	for _, l := range []struct{ variable, network, addr string }{
		{"LISTEN", "tcp", f.cfg.Listen}, {"PEER_LISTEN", "tcp", f.cfg.PeerListen}, {"STATUS_LISTEN", "tcp", f.cfg.StatusListen},
		{"GOSSIP_LISTEN", "tcp", f.cfg.GossipListen}, {"GOSSIP_LISTEN", "udp", f.cfg.GossipListen},
	} {
		err := tryListen(ctx, l.network, l.addr)
		what := fmt.Sprintf("%s %s (%s%s)", l.network, l.addr, Prefix, l.variable)
		switch {
		case err == nil:
			out = append(out, Check{"port", CheckOK, what + " is free", ""})
		case errors.Is(err, syscall.EADDRINUSE) && running != "":
			out = append(out, Check{"port", CheckOK, what + " is served, by the agent " + running, ""})
		case errors.Is(err, syscall.EADDRINUSE):
			out = append(out, Check{"port", CheckFail, what + " is in use by another process", "end it, or set " + Prefix + l.variable + " or " + Prefix + "PORT_BASE"})
		default:
			if op, ok := errors.AsType[*net.OpError](err); ok {
				err = op.Err
			}
			out = append(out, Check{"port", CheckFail, what + ": " + err.Error(), "set " + Prefix + l.variable + " to an address of this host"})
		}
	}
	return out
}

func tryListen(ctx context.Context, network, addr string) error {
	var lc net.ListenConfig
	if network == "udp" {
		c, err := lc.ListenPacket(ctx, network, addr)
		if err == nil {
			err = c.Close()
		}
		return err
	}
	l, err := lc.Listen(ctx, network, addr)
	if err == nil {
		err = l.Close()
	}
	return err
}

// runningAgent is the name of the agent that answers at the configured status listener, "" if there is none.
func (f *preflight) runningAgent(ctx context.Context) string {
	host, port, err := net.SplitHostPort(f.cfg.StatusListen)
	if err != nil {
		return ""
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/status", nil)
	if err != nil {
		return ""
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer res.Body.Close()
	var s Status
	if json.NewDecoder(res.Body).Decode(&s) != nil {
		return ""
	}
	return s.Node
}

// peers resolves the join addresses and pings whoever is behind them over TCP and over UDP.
func (f *preflight) peers(ctx context.Context) []Check {
	if len(f.cfg.Join) == 0 {
		return []Check{{"dns", CheckNote, Prefix + "JOIN is empty: this agent waits for others to join it", "set it to a name that resolves to all agents"}}
	}
	_, portText, _ := net.SplitHostPort(f.cfg.GossipListen)
	port, _ := strconv.ParseUint(portText, 10, 16)
	var out []Check
	var addrs []string
	for _, seed := range f.cfg.Join {
		c, cancel := context.WithTimeout(ctx, preflightPages)
		as, err := gossip.Resolve(c, seed, uint16(port), nil)
		cancel()
		if err != nil || len(as) == 0 {
			text := "no address"
			if err != nil {
				text = err.Error()
			}
			out = append(out, Check{"dns", CheckFail, seed + ": " + text, "correct " + Prefix + "JOIN; in Kubernetes a headless Service with publishNotReadyAddresses"})
			continue
		}
		out = append(out, pass("dns", "%s: %s", seed, strings.Join(as[:min(len(as), 4)], ", ")+map[bool]string{true: fmt.Sprintf(" and %d more", len(as)-4)}[len(as) > 4])...)
		addrs = append(addrs, as...)
	}
	slices.Sort(addrs)
	addrs = slices.Compact(addrs)
	more := max(0, len(addrs)-preflightPeers)
	addrs = addrs[:len(addrs)-more]
	keys, _ := gossip.ParseKeys(f.cfg.GossipKey) // key reports what is wrong with it
	found := make([]Check, len(addrs))
	var wg sync.WaitGroup
	for i, a := range addrs {
		wg.Go(func() {
			c, cancel := context.WithTimeout(ctx, preflightPing)
			defer cancel()
			found[i] = peerCheck(a, gossip.ProbePeer(c, a, f.cfg.Cluster, keys))
		})
	}
	wg.Wait()
	out = append(out, found...)
	if more > 0 {
		out = append(out, Check{"peer", CheckNote, fmt.Sprintf("%d more addresses were not tried", more), ""})
	}
	return out
}

func peerCheck(addr string, p gossip.Probe) Check {
	_, port, _ := net.SplitHostPort(addr)
	switch {
	case p.TCP == nil && p.UDP == nil:
		return Check{"peer", CheckOK, fmt.Sprintf("%s answers over TCP and UDP, %s", addr, p.RTT.Round(100*time.Microsecond)), ""}
	case p.TCP == nil:
		return Check{"peer", CheckFail, addr + " answers over TCP, not over UDP", "open UDP " + port + " both ways: load records travel over it"}
	case p.UDP == nil:
		return Check{"peer", CheckFail, addr + " answers over UDP, not over TCP: " + p.TCP.Error(), "open TCP " + port + " both ways: agents join over it"}
	case errors.Is(p.TCP, gossip.ErrNoAnswer):
		return Check{"peer", CheckFail, addr + " takes connections but understands nothing", "compare the key ids of `grapevine check` and " + Prefix + "CLUSTER on both sides"}
	}
	err := p.TCP
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err
	}
	return Check{"peer", CheckFail, fmt.Sprintf("%s is not reachable: %v", addr, err), "fine if that agent is down or is this one; else open TCP and UDP " + port}
}
