package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-metrics"
	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/serf/serf"

	"github.com/grapevine-lb/grapevine/routing"
)

// eventBuffer is the room for Serf's events between its locks and our reader, which never blocks.
const eventBuffer = 1024

// goodbyeTimes is how often the last record is sent, and goodbyeGap the time between two.
const (
	goodbyeTimes = 3
	goodbyeGap   = 50 * time.Millisecond
)

// Node is one agent's place in the cluster.
type Node struct {
	cfg     Config
	log     *slog.Logger
	profile Profile
	self    routing.Member
	name    string
	addr    string // gossip address that peers use

	serf   *serf.Serf
	hook   *hook
	ring   *ring // nil without keys
	book   *book
	heard  *heard
	pub    *publisher
	back   *background
	effort effort
	join   *joiner
	stats  counters

	strangers strangers
	namesakes namesakes

	refusedAt    time.Time // of the last line about a refused member; tell's alone
	refusedQuiet int       // how many since

	seq uint32 // of the last record; under pub.mu

	tagMu   sync.Mutex
	id      identity
	tagWake chan struct{}

	events  chan serf.Event
	done    chan struct{} // closed by Close, after Serf's shutdown
	wg      sync.WaitGroup
	started atomic.Bool
	leave   sync.Once
	closed  sync.Once
}

// New checks the configuration, binds the sockets and starts Serf. It contacts nobody; Run does. Errors are one line and
// name what is wrong. A node that is not run must be closed.
func New(cfg Config) (*Node, error) {
	n := &Node{cfg: cfg, log: cfg.Logger, tagWake: make(chan struct{}, 1), events: make(chan serf.Event, eventBuffer), done: make(chan struct{})}
	n.strangers.tried = make(map[uint64]time.Time)
	if n.log == nil {
		n.log = slog.Default()
	}
	if n.cfg.Resolver == nil {
		n.cfg.Resolver = net.DefaultResolver
	}
	if n.cfg.Listen == "" {
		n.cfg.Listen = ":" + strconv.Itoa(DefaultPort)
	}
	switch {
	case cfg.Member.Boot == 0:
		return nil, errors.New("gossip: no boot id")
	case len(cfg.Cluster) > memberlist.LabelMaxSize:
		return nil, fmt.Errorf("gossip: cluster name has %d bytes, at most %d", len(cfg.Cluster), memberlist.LabelMaxSize)
	}
	if err := ParseJoin(cfg.Join); err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	var err error
	if n.profile, err = ProfileNamed(cfg.Profile); err != nil {
		return nil, err
	}
	if n.ring, err = newRing(cfg.Keys); err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	n.self = cfg.Member
	n.self.Self, n.self.Version = true, ProtocolVersion
	n.name = NodeName(cfg.NodeName, n.self.Boot)
	n.self.Node = n.name
	n.id = identity{Member: n.self, pod: podName(cfg.NodeName), cluster: cfg.Cluster, keys: n.ring.ids()}

	n.book = newBook(n.name, n.self.Boot, cfg.Cluster, &n.profile)
	n.heard = newHeard(n.profile.Heartbeat)
	n.pub = newPublisher(n.budget(0, packetBudget))
	n.back = newBackground()
	if err := n.start(); err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	n.book.target = n.checkTarget
	n.wg.Go(n.drain)
	n.wg.Go(n.tell)
	return n, nil
}

// start binds the sockets and creates Serf.
func (n *Node) start() error {
	tr := n.cfg.Transport
	port := uint16(DefaultPort)
	if tr == nil {
		t, err := n.bind()
		if err != nil {
			return err
		}
		tr = t
		if _, p, err := parseListen(n.cfg.Listen); err == nil && p != 0 {
			port = p
		}
	}
	conf := n.profile.config()
	m := conf.MemberlistConfig
	n.hook = newHook(tr, func() { m.Delegate = &delegate{Delegate: m.Delegate, n: n} })
	m.Transport = n.hook
	m.Label = n.cfg.Cluster
	bridge := newLogBridge(n.log, &n.stats.strangers)
	conf.Logger, m.Logger = bridge, bridge
	conf.MetricLabels = []metrics.Label{{Name: nodeLabel, Value: n.name}}
	conf.NodeName = n.name
	conf.Tags = n.id.tags()
	conf.EventCh = n.events
	if n.ring != nil {
		m.Keyring = n.ring.ml
	}
	if n.cfg.tune != nil {
		n.cfg.tune(conf)
	}
	var err error
	if n.serf, err = serf.Create(conf); err != nil {
		_ = tr.Shutdown()
		return err
	}
	local := n.serf.LocalMember()
	n.addr = net.JoinHostPort(local.Addr.String(), strconv.Itoa(int(local.Port)))
	n.join = &joiner{n: n, seeds: n.cfg.Join, port: port, resolver: n.cfg.Resolver, bad: make(map[string]string), warn: make(map[string]time.Time)}
	return nil
}

// bind opens the real sockets after the checks that concern them.
func (n *Node) bind() (*transport, error) {
	if err := RequireKey(n.cfg.Listen, n.cfg.Keys, n.cfg.Insecure); err != nil {
		return nil, err
	}
	ip, port, err := parseListen(n.cfg.Listen)
	if err != nil {
		return nil, err
	}
	adv, err := AdvertiseAddr(n.cfg.Listen, n.cfg.Advertise, n.cfg.Resolver)
	if err != nil {
		return nil, err
	}
	if !isLocal(adv) {
		n.log.Warn("the advertised address is on no interface of this host: peers must reach both TCP and UDP of the gossip port there",
			slog.String(keyAddress, adv.String()))
	}
	if adv.IsLoopback() && n.joinsBeyondLoopback() {
		n.log.Warn("a loopback address is advertised, other hosts cannot reach it", slog.String(keyAddress, adv.String()))
	}
	if len(n.cfg.Keys) == 0 && !(ip.IsValid() && ip.IsLoopback()) {
		n.log.Warn("gossip is not encrypted and open to the network")
	}
	return listen(ip, port, adv, n.stranger)
}

func (n *Node) joinsBeyondLoopback() bool {
	for _, s := range n.cfg.Join {
		if host, _, _, err := parseSeed(s, 1); err == nil {
			if a, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !a.IsLoopback()) {
				return true
			}
		}
	}
	return false
}

// budget is the publishing budget for a number of peers.
func (n *Node) budget(peers, packets int) Budget {
	bytes := recordBytes
	if len(n.cfg.Keys) > 0 {
		bytes += cryptBytes
	}
	if n.cfg.Cluster != "" {
		bytes += 2 + len(n.cfg.Cluster)
	}
	return budgetFor(&n.profile, peers, bytes, packets)
}

// Name returns the node's unique name.
func (n *Node) Name() string { return n.name }

// Addr returns host:port under which peers reach gossip.
func (n *Node) Addr() string { return n.addr }

// Self returns our own identity as the peers see it, without the host of an empty peer address.
func (n *Node) Self() routing.Member {
	n.tagMu.Lock()
	defer n.tagMu.Unlock()
	return n.id.Member
}

// Members returns the other replicas that the member list knows, the dead included.
func (n *Node) Members() []MemberInfo { return n.book.list() }

// HasLeft reports whether a boot id left on purpose, also long after its member was forgotten (the last 4,096 are kept).
// Boot ids are never used again, so nothing that comes from such a one now is genuine.
func (n *Node) HasLeft(boot uint64) bool {
	n.book.mu.Lock()
	defer n.book.mu.Unlock()
	return n.book.left[boot]
}

// Alive returns how many replicas are alive, ourselves included.
func (n *Node) Alive() int { return int(n.book.alive.Load()) }

// Silent returns the members that are alive by the member list and yet gave no record for more than 3 of their
// heartbeats: UDP to them or from them is blocked, or their agent is stuck. Ask them over the peer link.
func (n *Node) Silent() []routing.Member {
	var out []routing.Member
	boots := n.heard.silent(time.Now())
	if len(boots) == 0 {
		return nil
	}
	n.book.mu.Lock()
	defer n.book.mu.Unlock()
	for _, e := range n.book.entries {
		for _, b := range boots {
			if e.alive && !e.stock && e.id.Boot == b {
				out = append(out, e.id.Member)
			}
		}
	}
	return out
}

// Run joins, publishes what Offer gives and keeps at it until ctx ends; then it says goodbye, leaves and closes. It
// returns when all that the node started has ended: nil, or the reason if Serf stopped by itself. It runs once.
func (n *Node) Run(ctx context.Context) error {
	if n.started.Swap(true) {
		return errors.New("gossip: Run called twice")
	}
	work, stop := context.WithCancel(ctx)
	defer stop()
	relay, stopRelay := context.WithCancel(context.WithoutCancel(ctx)) // until we left: our goodbye goes that way too
	defer stopRelay()
	var wg sync.WaitGroup
	wg.Go(func() { n.join.run(work) })
	wg.Go(func() { n.publish(work) })
	wg.Go(func() { n.publishBackground(work) })
	wg.Go(func() { n.spread(relay) })
	wg.Go(func() { n.retag(work) })
	wg.Go(func() { n.shed(work) })
	var err error
	select {
	case <-ctx.Done():
		n.Leave()
	case <-n.serf.ShutdownCh():
		select {
		case <-n.done:
		default:
			err = errors.New("gossip: serf stopped by itself")
		}
	}
	stop()
	stopRelay()
	n.Close()
	wg.Wait()
	return err
}

// Leave sends the goodbye record and leaves the cluster on purpose, which takes about 1.5 s, at most some 7 s when
// nobody answers. Run does it at its end; a second call waits for the first.
func (n *Node) Leave() {
	n.leave.Do(func() {
		if len(*n.book.targets.Load()) > 0 {
			n.goodbye()
		}
		if err := n.serf.Leave(); err != nil {
			n.log.Warn("leave", slog.Any(keyError, err))
		}
	})
}

// goodbye tells the peers directly, in milliseconds, that this boot is over; Serf's leave takes a second.
func (n *Node) goodbye() {
	n.pub.mu.Lock()
	r := n.pub.cur
	n.pub.mu.Unlock()
	r.Goodbye = true
	r.Flags |= routing.FlagDraining
	r.State = routing.StateGone
	for i := range goodbyeTimes {
		if i > 0 {
			time.Sleep(goodbyeGap)
		}
		n.Stamp(&r)
		n.sendAll(&r)
		if i == 0 && n.crowded() {
			n.relayOwn(r)
		}
	}
}

// Close ends the node without leaving, as a crash would. It waits for the node's own goroutines.
func (n *Node) Close() {
	n.closed.Do(func() {
		if err := n.serf.Shutdown(); err != nil {
			n.log.Warn("gossip shutdown", slog.Any(keyError, err))
		}
		n.pub.stop()
		close(n.done)
	})
	n.wg.Wait()
}

// drain notes Serf's events. Serf sends them while it holds its locks, so nothing here may wait.
func (n *Node) drain() {
	var batch []serf.MemberEvent
	for {
		select {
		case e := <-n.events:
			for more := true; more; { // what came at once is noted at once
				if m, ok := e.(serf.MemberEvent); ok {
					batch = append(batch, m)
				}
				select {
				case e = <-n.events:
				default:
					more = false
				}
			}
			n.book.note(batch, time.Now())
			clear(batch)
			batch = batch[:0]
		case <-n.done:
			return
		}
	}
}

// tell delivers the news of the book in order.
func (n *Node) tell() {
	for {
		select {
		case <-n.book.wake:
		case <-n.done:
			return
		}
		n.chooseKey()
		for {
			m, ok := n.book.next()
			if !ok {
				break
			}
			n.tellOne(m)
		}
	}
}

func (n *Node) tellOne(m news) {
	if m.bad != "" && m.event.Alive() {
		n.refuseMember(m)
		n.heard.part(m.id.Boot)
		if n.cfg.OnMember != nil { // it may have been a replica before
			n.cfg.OnMember(m.id.Member, MemberFailed)
		}
		return
	}
	if m.stock {
		n.log.Debug("a member that is no replica of this cluster", slog.String(keyMember, m.name), slog.String("event", m.event.String()))
		return
	}
	id := m.id.Member
	if m.event == MemberFailed && n.heard.saidGoodbye(id.Boot) {
		m.event = MemberLeft // memberlist's word of the leave overtook Serf's
	}
	if !m.event.Alive() {
		n.heard.part(id.Boot)
	}
	if m.event == MemberGone {
		n.heard.forget(id.Boot)
	}
	level := slog.LevelInfo
	if m.event == MemberUpdated || m.event == MemberGone {
		level = slog.LevelDebug
	}
	n.log.Log(context.Background(), level, "member "+m.event.String(), slog.String(keyMember, m.name), slog.String(keyAddress, id.Addr))
	if n.cfg.OnMember != nil {
		n.cfg.OnMember(id, m.event)
	}
	if !m.event.Alive() {
		return
	}
	now := time.Now()
	if r, ok := n.heard.join(id.Boot, now); ok && n.cfg.OnReport != nil {
		n.cfg.OnReport(r)
	}
	if m.event == MemberJoined {
		n.greet(id.Boot, now)
		n.checkNamesakes(m)
	}
}

// Describe changes what our tags say: the kind of engine and the digest of its model list. The change reaches the others
// within seconds; it is not for load.
func (n *Node) Describe(engine string, models routing.Opt[uint32]) {
	n.tagMu.Lock()
	changed := n.id.Engine != engine || n.id.models != models
	n.id.Engine, n.id.models = engine, models
	n.tagMu.Unlock()
	if changed {
		n.tagsChanged()
	}
}

func (n *Node) tagsChanged() {
	select {
	case n.tagWake <- struct{}{}:
	default:
	}
}

// retagGap keeps tag changes rare: each is a broadcast to all.
const retagGap = 2 * time.Second

// retag writes changed tags. Serf's call blocks until the change was sent around.
func (n *Node) retag(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.tagWake:
		}
		n.tagMu.Lock()
		tags := n.id.tags()
		n.tagMu.Unlock()
		if err := n.serf.SetTags(tags); err != nil && ctx.Err() == nil {
			n.log.Debug("tags", slog.Any(keyError, err))
		}
		if !sleep(ctx, retagGap) {
			return
		}
	}
}
