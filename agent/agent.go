package agent

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/agent/otlp"
	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/gpu"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// Options are what a program that embeds an agent may set beside the configuration. The zero value is fine.
type Options struct {
	Logger    *slog.Logger         // slog.Default if nil
	Policy    routing.Policy       // replaces the one that Config.Policy names
	Seed      uint64               // of random choices; 0 = random
	Transport memberlist.Transport // replaces gossip's sockets, for tests

	// StreamThread says that GOMAXPROCS is one more than there are CPUs, for a thread for streams that keeps it to itself; see
	// proxy.Config.StreamThread.
	StreamThread bool

	// Step is called at the steps of the steal protocol (proxy.Config.Step), for tests that kill an agent there.
	Step func(name string)

	// Listen and Dial replace the network under the HTTP listeners and under connections to engine and peers, for tests.
	// Addresses must look like those of TCP.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	Dial   func(ctx context.Context, network, address string) (net.Conn, error)
}

// Agent is one agent. Make it with New and run it once with Run.
type Agent struct {
	cfg     Config
	opts    Options
	log     *slog.Logger
	boot    uint64
	started time.Time

	keys   [][]byte
	table  *routing.Table
	policy routing.Policy
	kept   routing.Classes
	engine *engine.Reader
	client *http.Client // to the own engine's pages

	openGPU func(gpu.Config) (gpuReader, error)

	own     own
	peers   peerBook
	digests digestBook
	salt    *proxy.PrefixSalt
	drain   drain
	ramp    ramp

	mode   modeState
	flight flight

	listening chan struct{} // closed when all listeners are open and the parts below are set
	listen    ListenStatus
	member    routing.Member
	tls       *peertls.Identity // nil = plain
	strangers strangers
	ring      keyRing
	apiKeys   *apiKeys       // nil = clients need none
	traces    *otlp.Exporter // nil = nobody traces
	proxy     *proxy.Proxy
	node      *gossip.Node

	publishing sync.Mutex   // one record at a time, so that the newest wins
	beat       atomic.Int64 // last turn of the report loop, ns since 1970

	mu       sync.Mutex
	warnings map[string]string // by cause, so that a cause that ended takes its warning away
	ran      bool
}

// New checks the configuration and builds an agent. It opens and starts nothing.
func New(cfg Config, opts Options) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	a := &Agent{cfg: cfg, opts: opts, boot: newBoot(), started: time.Now(), listening: make(chan struct{}), warnings: map[string]string{}}
	if a.cfg.NodeName == "" {
		a.cfg.NodeName = hostName()
	}
	var err error
	if a.kept, err = routing.ParseClasses(cfg.Classes); err != nil {
		return nil, &ConfigError{Prefix + "CLASSES", strings.Join(cfg.Classes, ","), err.Error()}
	}
	if a.keys, err = splitKeys(cfg.GossipKey); err != nil {
		return nil, err
	}
	if a.policy = opts.Policy; a.policy == nil {
		if a.policy, err = routing.NewPolicy(cfg.Policy, routing.WithDigests(cfg.Affinity != "off")); err != nil {
			return nil, &ConfigError{Prefix + "POLICY", cfg.Policy, err.Error()}
		}
	}
	a.client = engineClient(cfg.engineURL())
	ec := engineConfig(&a.cfg)
	if opts.Dial != nil {
		a.client.Transport.(*http.Transport).DialContext = opts.Dial
		ec.Client = &http.Client{CheckRedirect: a.client.CheckRedirect, Transport: &http.Transport{DialContext: opts.Dial,
			DisableCompression: true, MaxIdleConnsPerHost: 2, IdleConnTimeout: 3 * time.Second}}
	}
	a.engine = engine.New(ec)
	a.member = routing.Member{Boot: a.boot, Node: a.cfg.NodeName + "." + bootText(a.boot)[:8], Zone: cfg.Zone, Self: true}
	a.log = opts.Logger.With(KeyNode, a.member.Node)
	a.setTraces()
	a.table = routing.NewTable(a.member)
	a.digests.init()
	a.salt = proxy.NewPrefixSalt(saltKey(a.keys))
	a.table.SetOwnDigest(a.digests.own)
	a.openGPU = openGPU
	a.own.changed = make(chan struct{}, 1)
	a.drain.begun = make(chan struct{})
	a.drain.ended = make(chan struct{})
	return a, nil
}

// newBoot makes the id of this start: random, never zero.
func newBoot() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails, see crypto/rand
		if n := binary.BigEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}

// hostName is the first label of the host's name, made fit for a node name.
func hostName() string {
	h, err := os.Hostname()
	if err != nil {
		return "grapevine"
	}
	h = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '.' {
			return r
		}
		return '-'
	}, h)
	if h = strings.Trim(h[:min(len(h), 100)], "-."); h == "" {
		return "grapevine"
	}
	return h
}

func engineConfig(c *Config) engine.Config {
	return engine.Config{URL: c.engineURL(), Kind: engine.Kind(c.EngineKind), MetricsURL: c.EngineMetricsURL, Mapping: c.EngineMetrics,
		APIKey: c.EngineAPIKey}
}

// Listening is closed when all listeners are open; from then on Addresses answers.
func (a *Agent) Listening() <-chan struct{} { return a.listening }

// Addresses are those on which the agent really listens. They are empty before Listening.
func (a *Agent) Addresses() ListenStatus {
	select {
	case <-a.listening:
		return a.listen
	default:
		return ListenStatus{}
	}
}

// Node is the agent's name, unique for each start.
func (a *Agent) Node() string { return a.member.Node }

// Ready reports whether the own replica takes requests, and if not, why. It is what /readyz says.
func (a *Agent) Ready() (ok bool, why string) { return a.own.ready() }

// entryReady reports whether a request that enters here can be answered by some replica.
func (a *Agent) entryReady() (ok bool, why string) {
	if ok, why = a.own.ready(); ok {
		return ok, why
	}
	now := time.Now()
	for _, p := range a.table.Snapshot().Peers() {
		r, _ := p.Report()
		models, _, known := p.Models() // pulled after the first record; without them nothing can be sent there
		if !p.Self() && p.Fresh(now) && known && len(models) > 0 && r.State == routing.StateReady && r.Flags&(routing.FlagDraining|routing.FlagEngineDown) == 0 {
			return true, ""
		}
	}
	return false, "no replica can answer; the own one: " + why
}

// warn shows a warning on the status page until clear is called for the same cause. It reports whether it is new.
func (a *Agent) warn(cause, text string) (fresh bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	fresh = a.warnings[cause] == ""
	a.warnings[cause] = text
	return fresh
}

func (a *Agent) clear(cause string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.warnings, cause)
}

// engineClient makes the client for the engine's pages that are passed on; the Reader has one of its own.
func engineClient(u interface{ String() string }) *http.Client {
	t := &http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: 4 * time.Second, DisableCompression: true}
	if path, ok := strings.CutPrefix(u.String(), "unix://"); ok {
		t.DialContext = dialUnix(path)
	}
	return &http.Client{Transport: t, Timeout: 10 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// listenError names the variable behind a listener that cannot be opened.
func listenError(variable, addr string, err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Err != nil {
		err = op.Err
	}
	return fmt.Errorf("%s%s=%q: cannot listen: %w", Prefix, variable, addr, err)
}
