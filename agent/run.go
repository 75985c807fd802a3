package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// task is one thing that runs from the opening of the listeners to the end of the drain. run returns nil when its context
// ends; an error before that ends the agent.
type task struct {
	name string
	run  func(context.Context) error
}

// tasks lists what runs, in the order of start. All goroutines of an agent belong to one of them.
func (a *Agent) tasks() []task {
	list := []task{
		{"proxy", a.proxy.Run},
		{"engine", a.watchEngine},
		{"reading", a.readEngine},
		{"gpu", a.watchGPU},
		{"report", a.reportLoop},
		{"models", a.pullModels},
		{"ask", a.askSilent},
		{"mode", a.spreadMode},
		{"keys", a.watchKeys},
		{"api keys", a.watchAPIKeys},
		{"digests", a.shareDigests},
	}
	if a.traces != nil {
		list = append(list, task{"traces", a.traces.Run})
	}
	return list
}

// Run opens the listeners, works until ctx ends, drains, leaves and closes. It returns nil after that, or an error if a
// listener cannot be opened or something breaks that the agent cannot do without. It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	a.mu.Lock()
	ran := a.ran
	a.ran = true
	a.mu.Unlock()
	if ran {
		return errors.New("agent: Run called twice")
	}
	defer close(a.drain.ended)
	defer a.flight.stop()
	a.logConfig()
	s, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer s.close()

	// What works must outlive ctx: the end of ctx begins the drain. Its values stay.
	work, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	var wg sync.WaitGroup
	start := func(t task) {
		wg.Go(func() {
			pprof.Do(work, pprof.Labels("grapevine", t.name), func(c context.Context) {
				if err := t.run(c); err != nil {
					stop(fmt.Errorf("%s: %w", t.name, err))
				}
			})
		})
	}
	gossipCtx, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave()
	gone := make(chan error, 1)
	go func() { gone <- a.node.Run(gossipCtx) }() // owned: received below
	for _, t := range a.tasks() {
		start(t)
	}
	for _, l := range s.servers {
		start(task{l.name, l.serve})
	}
	a.log.Info(MsgListening, "client", a.listen.Client, "peer", a.listen.Peer, "status", a.listen.Status, "gossip", a.listen.Gossip, KeyVersion, Version())

	var broken error
	select {
	case <-ctx.Done():
		a.shutdown(ctx, work, s)
	case <-work.Done():
		broken = context.Cause(work)
	case err := <-gone:
		broken, gone = err, nil
		if err == nil {
			broken = errors.New("gossip ended")
		}
	}
	leave()
	if gone != nil {
		if err := <-gone; err != nil && broken == nil {
			a.log.Warn("leaving", KeyErr, err)
		}
	}
	s.shutdown(a.lastMoment())
	stop(nil)
	wg.Wait()
	a.client.CloseIdleConnections()
	a.engine.Close()
	a.log.Info(MsgStopped)
	return broken
}

// warnAlone says that there is nobody else, unless that is what the configuration wants.
func (a *Agent) warnAlone() {
	if a.node.Alive() > 1 {
		return
	}
	if len(a.cfg.Join) == 0 {
		a.log.Info(MsgAlone, KeyHint, "set "+Prefix+"JOIN to join others")
		return
	}
	a.warn("alone", MsgAlone)
	a.log.Warn(MsgAlone, "join", strings.Join(a.cfg.Join, ","))
}

func (a *Agent) logConfig() {
	for _, w := range a.cfg.Warnings {
		a.warn("config "+w, w)
		a.log.Warn(MsgConfig, KeyReason, w)
	}
	if a.cfg.GossipKey == "" && !isLoopback(a.cfg.GossipListen) {
		a.warn("insecure", MsgInsecure)
		a.log.Warn(MsgInsecure, KeyHint, "set "+Prefix+"GOSSIP_KEY")
	}
}

// server is one HTTP listener.
type server struct {
	name string
	raw  net.Listener // what was opened
	ln   net.Listener // over TLS or not
	http interface {
		Serve(net.Listener) error
		Shutdown(context.Context) error
		Close() error
	}
}

func (s *server) serve(context.Context) error {
	if err := s.http.Serve(s.ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// shutdown ends it as [http.Server.Shutdown] does, but so that none is reset who connects at this moment.
func (s *server) shutdown(ctx context.Context) error {
	proxy.LastAccepts(s.raw)
	return s.http.Shutdown(ctx)
}

// servers are all HTTP listeners of an agent.
type servers struct {
	servers []*server
	node    *gossip.Node
	wg      sync.WaitGroup // of refuse
}

// open opens the listeners and builds what needs their addresses. On an error nothing stays open.
func (a *Agent) open(ctx context.Context) (*servers, error) {
	s := &servers{}
	fail := func(err error) (*servers, error) { s.close(); return nil, err }
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}}
	lc.SetMultipathTCP(false) // Go's default on Linux; it takes no filter, see proxy.LastAccepts
	listen := a.opts.Listen
	if listen == nil {
		listen = lc.Listen
	}
	for _, l := range []struct{ name, variable, addr string }{
		{"client", "LISTEN", a.cfg.Listen}, {"peer", "PEER_LISTEN", a.cfg.PeerListen}, {"status", "STATUS_LISTEN", a.cfg.StatusListen},
	} {
		ln, err := listen(ctx, "tcp", l.addr)
		if err != nil {
			return fail(listenError(l.variable, l.addr, err))
		}
		s.servers = append(s.servers, &server{name: l.name, raw: ln, ln: ln})
	}
	client, peer, status := s.servers[0], s.servers[1], s.servers[2]
	var err error
	a.strangers.init(a.log)
	if err = a.setTLS(); err != nil {
		return fail(err)
	}
	if a.cfg.APIKeysFile != "" {
		strangers := &limitedLog{write: a.log.Warn}
		if a.apiKeys, err = newAPIKeys(a.cfg.APIKeysFile, strangers); err != nil {
			return fail(&ConfigError{Prefix + "API_KEYS_FILE", a.cfg.APIKeysFile, err.Error()})
		}
	}
	a.member.Addr = peerAddress(peer.ln.Addr())
	a.node, err = gossip.New(gossip.Config{
		NodeName: a.cfg.NodeName, Member: a.member, Cluster: a.cfg.Cluster, Listen: a.cfg.GossipListen, Advertise: a.cfg.Advertise,
		Join: a.cfg.Join, Keys: a.keys, Insecure: a.cfg.Insecure, Profile: a.cfg.GossipProfile, Logger: a.log, Transport: a.opts.Transport,
		OnMember: a.onMember, OnReport: a.onReport, OnDelta: a.onDelta,
		OnRefused: func(name, why string) { a.warn("refused member", "member "+name+" gets no requests: "+why) },
	})
	if err != nil {
		return fail(fmt.Errorf("%sGOSSIP_LISTEN=%q: %w", Prefix, a.cfg.GossipListen, err))
	}
	s.node = a.node
	self := a.node.Self()
	if host, port, err := net.SplitHostPort(self.Addr); err == nil && host == "" {
		h, _, _ := net.SplitHostPort(a.node.Addr())
		self.Addr = net.JoinHostPort(h, port)
	}
	a.member.Version, a.member.Addr = self.Version, self.Addr
	a.table.SetMember(a.member, time.Now())

	if a.proxy, err = proxy.New(a.proxyConfig()); err != nil {
		return fail(err)
	}
	a.takeMode(a.cfg.Mode == ModeShadow, 0)
	a.table.SetLive(a.live)
	a.listen = ListenStatus{Client: client.ln.Addr().String(), Peer: peer.ln.Addr().String(), Status: status.ln.Addr().String(), Gossip: a.node.Addr()}

	client.http = a.proxy.ClientServer(httpServer(a.proxy.ClientHandler(), a.log))
	if a.cfg.TLSCertFile != "" {
		cert, err := newCertFiles(a.cfg.TLSCertFile, a.cfg.TLSKeyFile, a.log)
		if err != nil {
			return fail(&ConfigError{Prefix + "TLS_CERT_FILE", a.cfg.TLSCertFile, err.Error()})
		}
		client.ln = tls.NewListener(proxy.FastListener(client.ln), &tls.Config{GetCertificate: cert.get, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}})
	}
	peer.http = a.proxy.PeerServer(httpServer(a.peerHandler(a.proxy.PeerHandler()), a.log), pathPrefix)
	if a.tls != nil {
		peer.ln = tls.NewListener(a.tls.Listener(proxy.FastListener(peer.ln)), a.tls.ServerConfig(a.hasLeft, "h2", "http/1.1"))
	}
	status.http = httpServer(a.console().handler(), a.log)
	close(a.listening)
	return s, nil
}

// httpServer is a server for streams: no limit on a request's or an answer's time, but on its head's.
func httpServer(h http.Handler, log *slog.Logger) *http.Server {
	s := &http.Server{Handler: h, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 650 * time.Second, MaxHeaderBytes: 256 << 10, Protocols: new(http.Protocols)}
	s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 500, MaxReceiveBufferPerConnection: 4 << 20, MaxReceiveBufferPerStream: 1 << 20,
		SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second, WriteByteTimeout: 2 * time.Minute}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	return s
}

// refuse takes no new clients; those who have a request under way have until last for it.
func (s *servers) refuse(last time.Time) {
	s.wg.Go(func() {
		ctx, cancel := context.WithDeadline(context.Background(), last)
		defer cancel()
		_ = s.servers[0].shutdown(ctx) // whoever is left is shutdown's
	})
}

// shutdown ends the servers after the drain: no new connections, what came in while the agent left may end until the last
// moment, then all is closed. The status listener, with its live pages, is closed last and at once.
func (s *servers) shutdown(last time.Time) {
	ctx, cancel := context.WithDeadline(context.Background(), last)
	defer cancel()
	var wg sync.WaitGroup
	for _, x := range s.servers {
		if x.name == "status" {
			continue
		}
		wg.Go(func() {
			if x.shutdown(ctx) != nil {
				_ = x.http.Close()
			}
		})
	}
	wg.Wait()
	s.close()
	s.wg.Wait()
}

// close closes what open opened; after shutdown it does nothing.
func (s *servers) close() {
	for _, x := range s.servers {
		if x.http != nil {
			_ = x.http.Close()
		}
		_ = x.ln.Close()
	}
	if s.node != nil {
		s.node.Close()
	}
}

// peerAddress is what peers dial: the listener's own IP, or only its port if it listens on all; gossip then puts the
// advertised address before it.
func peerAddress(addr net.Addr) string {
	t, ok := addr.(*net.TCPAddr)
	if !ok {
		return addr.String()
	}
	if t.IP.IsUnspecified() {
		return ":" + strconv.Itoa(t.Port)
	}
	return t.String()
}

// setTLS makes the identity between agents: from the gossip keys, or from own files; nil means plain.
func (a *Agent) setTLS() (err error) {
	switch {
	case a.cfg.PeerTLSCertFile != "":
		a.tls, err = peertls.NewFromFiles(a.boot, a.cfg.PeerTLSCertFile, a.cfg.PeerTLSKeyFile, a.cfg.PeerTLSCAFile)
		if err != nil {
			err = &ConfigError{Prefix + "PEER_TLS_CERT_FILE", a.cfg.PeerTLSCertFile, err.Error()}
		}
	case len(a.keys) > 0:
		a.tls, err = peertls.New(a.boot, a.keys)
	}
	if a.tls != nil {
		a.tls.OnStranger(a.strangers.atPeer)
	}
	return err
}

// clientTLS secures what is dialled to a peer; nil means plain.
func (a *Agent) clientTLS() func(context.Context, net.Conn, uint64, ...string) (*tls.Conn, error) {
	if a.tls == nil {
		return nil
	}
	return a.tls.Client
}

// peerBoot tells whose certificate a connection shows; nil means plain.
func (a *Agent) peerBoot() func(tls.ConnectionState) uint64 {
	if a.tls == nil {
		return nil
	}
	return func(cs tls.ConnectionState) uint64 {
		_, boot, err := a.tls.Peer(cs)
		if err != nil {
			return 0
		}
		return boot
	}
}

// hasLeft reports whether a boot id is one that left: its certificate is valid for ever, its membership is not.
func (a *Agent) hasLeft(boot uint64) bool { return a.node.HasLeft(boot) }

func (a *Agent) proxyConfig() proxy.Config {
	var authorize func(string, string) (proxy.Access, bool)
	if a.apiKeys != nil {
		authorize = a.apiKeys.authorize
	}
	return proxy.Config{
		Authorize: authorize, Hosts: a.cfg.Hosts, MaxConns: a.cfg.MaxConnections,
		Table: a.table, Policy: a.policy, EngineURL: a.cfg.engineURL(), EngineAPIKey: a.cfg.EngineAPIKey,
		EngineKind: func() string { return string(a.engine.Kind()) }, PeerTLS: a.clientTLS(), PeerBoot: a.peerBoot(), Salt: a.salt,
		MaxBody: int64(a.cfg.MaxBody), MaxInflight: a.cfg.MaxInflight, FirstByteTimeout: a.cfg.FirstByteTimeout, IdleTimeout: a.cfg.IdleTimeout,
		RetryBudget: a.cfg.RetryBudget, AllowPaths: strings.Join(a.cfg.AllowPaths, ","), TrustPriority: a.cfg.TrustPriority, TrustGateway: gateways(a.cfg.TrustGateway),
		Reply: replyClass, Continue: a.continuations(), Record: a.record, OnRecord: a.onRecord, Answer: a.answerAll, Digest: a.digests.own, NoPrefix: a.cfg.Affinity == "off" || a.cfg.Affinity == "session",
		NoSession: a.cfg.Affinity == "off" || a.cfg.Affinity == "prefix", NoGate: a.cfg.Gate == "off", QueueLimit: queueLimit(a.cfg.QueueLimit), QueueTimeout: a.cfg.QueueTimeout, OnHeld: a.own.wake, Models: a.modelEntries, Alias: a.aliasOf, AccessLog: a.cfg.AccessLog, Tracing: a.tracing(), Logger: a.log, Seed: a.opts.Seed, Dial: a.opts.Dial, StreamThread: a.opts.StreamThread, Step: a.opts.Step,
	}
}

// replyClass says what an error answer of an engine of that kind means, by the kind's table.
func replyClass(kind string, status int, body []byte) proxy.ReplyClass {
	ab := engine.AbilitiesOf(engine.Kind(kind))
	switch {
	case ab.IsDead(status, body):
		return proxy.ReplyDead
	case status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable:
		return proxy.ReplyBusy
	case ab.IsNotRun(status, body):
		return proxy.ReplyNotRun
	}
	return proxy.ReplyOther
}

// live is the own replica as a pick sees it: the exact count, not the record of up to 50 ms ago.
func (a *Agent) live() routing.Live {
	now := time.Now()
	r := a.own.report(a.load(now), a.cfg.Weight, now)
	return routing.Live{
		Running: r.Running.Or(0), Waiting: r.Waiting.Or(0), Held: r.Held.Or(0), PendingTokens: r.PendingTokens.Or(0),
		HeldTokens: r.HeldTokens.Or(0), PrefillRate: r.PrefillRate.Or(0), KVUsed: r.KVUsed.Or(0),
	}
}
