package proxy

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// ReplyClass says what an engine's error answer means for trying elsewhere. The engines' tables know.
type ReplyClass uint8

// The classes. Without a table 429 and 503 are busy and everything else is other.
const (
	ReplyOther  ReplyClass = iota // passed on unchanged
	ReplyBusy                     // it did not run: the engine is full or loading
	ReplyNotRun                   // it did not run: the engine is going away
	ReplyDead                     // the engine is dead: it may have run until then, and the replica is to be left alone
)

// ModelEntry is one model as a replica's engine lists it.
type ModelEntry struct {
	ID  string
	Raw json.RawMessage // the engine's own object, passed on verbatim
}

// Config is what a Proxy needs. Table, Policy and EngineURL are required; limits of zero take their defaults.
type Config struct {
	Table  *routing.Table
	Policy routing.Policy

	EngineURL    *url.URL // http://host:port, https://…, or unix:///path
	EngineAPIKey string   // replaces the client's Authorization towards our engine; "" = the client's passes
	EngineKind   func() string

	// PeerTLS makes a TLS connection to the peer with that boot id over raw, handshake included; nil = plain HTTP
	// between agents. See peertls.Identity.Client.
	PeerTLS func(ctx context.Context, raw net.Conn, boot uint64, protos ...string) (*tls.Conn, error)
	// PeerBoot tells the boot id that a connection on the peer listener has proven, 0 if it proves none; nil = plain.
	PeerBoot func(tls.ConnectionState) uint64

	// Salt keys the hashes of prompt prefixes and sessions; nil = none are made.
	Salt *PrefixSalt

	MaxBody          int64         // bytes of a request body; default 64 MiB
	KeepBody         int64         // bytes of one body kept for sending it again; default 32 MiB
	KeepBodies       int64         // bytes of all kept bodies together; default 256 MiB
	MaxInflight      int           // requests under way here in both roles; 0 = no limit
	FirstByteTimeout time.Duration // from sent to the first content; default 600 s, negative = none
	IdleTimeout      time.Duration // silence after the first content; default 120 s, negative = none
	RetryBudget      float64       // repeats allowed for each first attempt; default 0.1
	AllowPaths       string        // comma list of further paths, see GRAPEVINE_ALLOW_PATHS
	TrustPriority    bool          // clients may ask for a class above the default
	Hosts            []string      // names that clients may use for us, without port; .example.org = all below; none = any
	MaxConns         int           // connections of the client listener; 0 = no limit

	// TrustGateway reports whether the connection from there is that of a gateway that may choose replicas; nil = none is.
	TrustGateway func(remote string) bool

	// Authorize checks a client's key ("" = it showed none), which it must not keep; nil = everybody may come in.
	Authorize func(key, remote string) (Access, bool)

	// Reply classifies an answer with an error status of an engine of that kind; body is at most its first 64 KiB.
	Reply func(kind string, status int, body []byte) ReplyClass
	// Record returns our newest load record in its wire form, for answers to other agents; nil = none is sent.
	Record func() []byte
	// OnRecord takes a record that came with an answer of the agent from.
	OnRecord func(from uint64, record []byte)
	// Models lists the models of all live replicas, one entry for each replica and model.
	Models func() []ModelEntry

	// Digest is what our own engine has cached; requests that go to it are noted there. nil = nothing is known.
	Digest *routing.Digest

	NoPrefix     bool          // prompts' prefixes do not count in a choice
	NoSession    bool          // … nor do session keys
	NoGate       bool          // requests go to the engine at once
	QueueLimit   int           // most requests held at the gate; negative = none, 0 = the default 1024
	QueueTimeout time.Duration // longest wait from arrival to the engine; default 30 s
	OnHeld       func()        // called when the number of held requests goes from 0 to 1

	// Answer answers further kinds of questions of other agents from memory, by appending to reply; ok false = none.
	Answer func(kind byte, payload, reply []byte) (answer []byte, ok bool)

	// Alias returns the own engine's name for a model that the client named by an alias, or "".
	Alias func(name string) string

	// Continue says how an engine of that kind goes on with a text that was begun elsewhere; nil = broken streams are not
	// continued.
	Continue func(kind string) Continuation

	// Dial opens connections; nil = the network. Tests put an in-memory network here.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	// StreamThread has one thread read the established streams (pump.go), which costs less than a goroutine for each. While there
	// is traffic it keeps one of GOMAXPROCS to itself, also when it waits. So it is for a program that has one to spare, as grapevine agent
	// gives itself; two agents in a process would take two. Without it, or where GOMAXPROCS is 1, each stream has its goroutine.
	StreamThread bool

	NoSteal bool // held requests of others are not pulled

	// Step is called at the steps of the steal protocol, for tests that stop the world there; nil = none.
	Step func(name string)

	// std sends by net/http: the twin in tests of our own HTTP/1.1.
	std bool

	// AccessLog is the share of requests, 0..1, that become lines of level info; those that failed do whenever it is above 0.
	AccessLog float64

	// Tracing is how requests are traced; nil = nobody traces.
	Tracing *Tracing

	Logger *slog.Logger // nil = discard
	Seed   uint64       // of the random choices; 0 = random
}

// Proxy takes requests on two listeners, the clients' and the other agents', and has them answered by the best replica.
// New builds it, Run keeps its pools tidy; the handlers work without Run too.
type Proxy struct {
	cfg   Config
	allow allowedPaths
	log   *slog.Logger
	self  uint64 // our boot id
	hop   string // the same, as the hop header has it

	engine     upstream
	links      peerLinks
	questions  questions
	askers     askers
	stealWake  chan struct{}
	othersHold atomic.Bool // by a record, since we looked last
	hearing    atomic.Bool // the answer to a pull of ours is being read
	owners     owners
	account    account
	gate       gate
	suspicion  suspicion
	lessons    lessons
	budget     *retryBudget
	bodies     *replayBudget
	deadly     *deadlySet
	metrics    *metrics
	picks      pickLog
	rnds       sync.Pool // of *rand.Rand

	shadow    shadow
	inflight  atomic.Int64
	draining  atomic.Bool
	lives     lives
	ends      *hangups  // of both servers' connections, and of streams' upstreams
	watches   sync.Pool // of *watch at rest
	exchanges sync.Pool // of *exchange
	ourRecord ownRecord
}

// New checks the configuration and builds a Proxy. It opens nothing.
func New(cfg Config) (*Proxy, error) {
	if cfg.Table == nil || cfg.Policy == nil || cfg.EngineURL == nil {
		return nil, errors.New("proxy: Table, Policy and EngineURL are required")
	}
	allow, err := parseAllowedPaths(cfg.AllowPaths)
	if err != nil {
		return nil, err
	}
	def(&cfg.MaxBody, 64<<20)
	def(&cfg.KeepBody, 32<<20)
	def(&cfg.KeepBodies, 256<<20)
	def(&cfg.FirstByteTimeout, 600*time.Second)
	def(&cfg.IdleTimeout, 120*time.Second)
	def(&cfg.RetryBudget, 0.1)
	def(&cfg.QueueTimeout, 30*time.Second)
	if cfg.QueueLimit == 0 {
		cfg.QueueLimit = 1024
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()
	}
	p := &Proxy{
		cfg: cfg, allow: allow, log: cfg.Logger, self: cfg.Table.Self().Boot(),
		budget:  newRetryBudget(cfg.RetryBudget, time.Now()),
		bodies:  &replayBudget{limit: cfg.KeepBodies, patience: cfg.QueueTimeout},
		deadly:  newDeadlySet(),
		metrics: newMetrics(), ends: newHangups(cfg.StreamThread),
	}
	p.hop = formatBoot(p.self)
	p.questions.p = p
	p.stealWake = make(chan struct{}, 1)
	p.gate = gate{onDry: p.dry, came: &p.metrics.steal.came, off: cfg.NoGate, account: &p.account, limit: max(cfg.QueueLimit, 0), timeout: cfg.QueueTimeout, onHeld: cfg.OnHeld,
		queue: holdQueue{digest: cfg.Digest}, metrics: gateMetrics{waited: newHistogram(heldBounds)}}
	if p.engine, err = newEngineUpstream(&p.cfg); err != nil {
		return nil, err
	}
	var streams atomic.Uint64
	p.rnds.New = func() any { return rand.New(rand.NewPCG(cfg.Seed, streams.Add(1))) }
	p.exchanges.New = func() any { return &exchange{rnd: p.rnds.Get().(*rand.Rand)} }
	born := time.Now() // before all that a watch is told of
	p.watches.New = func() any { return &watch{base: born} }
	return p, nil
}

func def[T int64 | float64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Run drops the connections of peers that are gone, until ctx ends; then it closes all idle connections.
func (p *Proxy) Run(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	var thief sync.WaitGroup
	defer thief.Wait()
	if !p.cfg.NoSteal && !p.cfg.NoGate {
		thief.Go(func() { p.steal(ctx) })
	}
	for {
		select {
		case <-ctx.Done():
			p.gate.close()
			p.questions.close()
			p.links.closeAll()
			p.engine.close()
			return nil
		case <-tick.C:
			p.links.sweep(p.cfg.Table.Snapshot())
			p.questions.sweep(p.cfg.Table.Snapshot())
			p.engine.sweep(time.Now())
		}
	}
}

// ClientHandler serves API clients.
func (p *Proxy) ClientHandler() http.Handler { return &handler{p: p, role: roleEntry} }

// PeerHandler serves other agents. Who may connect is the listener's matter.
func (p *Proxy) PeerHandler() http.Handler { return &handler{p: p, role: roleTarget} }

// Load returns what is known exactly about our own engine's work.
func (p *Proxy) Load() Load {
	l := p.account.load()
	l.Held, l.HeldTokens = p.gate.load()
	return l
}

// Inflight is how many requests are under way here, in both roles.
func (p *Proxy) Inflight() int { return int(p.inflight.Load()) }

// SetDraining begins or ends draining: answers close their connections, other agents' requests are refused so that
// their entries move them, and our own engine serves clients only if nobody else can.
func (p *Proxy) SetDraining(on bool) {
	p.draining.Store(on)
	if on {
		p.gate.drain()
	}
}

// Draining reports whether SetDraining is on.
func (p *Proxy) Draining() bool { return p.draining.Load() }

// Wait returns when nothing is under way, or with ctx's error.
func (p *Proxy) Wait(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for p.inflight.Load() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// Empty takes everything away from our own engine, as at the end of the drain timeout: what other agents sent goes back to
// them, what entered here goes on at a peer where it can.
func (p *Proxy) Empty() { p.account.cutAll(errCauseDrain, 0) }

// EngineLost ends what shows no progress at our own engine, because that is dead or hangs: the entries replay or continue it
// elsewhere. An engine that lets nobody in may still finish its streams, so what flows is left alone: call it again.
func (p *Proxy) EngineLost() { p.account.cutAll(errCauseEngine, lostAfter) }

// lostAfter is how long a request at an engine that was declared dead must have been silent to be taken away.
const lostAfter = 2 * time.Second

// Cut ends all running exchanges, as at the end of the drain timeout: streams end with an error event and without
// their final chunk, so that no client takes them for whole. It cannot be undone.
func (p *Proxy) Cut() { p.lives.end(errCauseDrain) }
