package agent

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
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

// Paths on the peer listener that agents ask each other; all others are requests.
const (
	pathPrefix = "/grapevine/"
	pathModels = pathPrefix + "v1/models"
	pathRecord = pathPrefix + "v1/record"
)

const (
	lookEvery   = 250 * time.Millisecond // for changed model lists
	pullTimeout = 2 * time.Second
	pullRetry   = time.Second
	maxModels   = 4 << 20 // bytes of a model list
	askEvery    = time.Second
	askTimeout  = time.Second
	maxAsks     = 8 // pulls or asks at once
)

// sharedModel is one model as agents tell each other.
type sharedModel struct {
	ID            string          `json:"id"`
	ContextLength int             `json:"context_length,omitempty"`
	Aliases       []string        `json:"aliases,omitempty"`
	Raw           json.RawMessage `json:"raw,omitempty"` // the engine's own object
}

func modelList(models []engine.Model) []sharedModel {
	out := make([]sharedModel, 0, len(models))
	for _, m := range models {
		out = append(out, sharedModel{m.ID, m.ContextLength, m.Aliases, m.Raw})
	}
	return out
}

// peerBook is what was pulled from other agents, by boot id.
type peerBook struct {
	mu     sync.Mutex
	pulled map[uint64]*pulled
}

type pulled struct {
	digest  uint32
	known   bool
	models  []sharedModel
	tried   time.Time
	pulling bool
	why     string // the last warning about its silence, so that it is logged once
}

func (b *peerBook) entry(boot uint64) *pulled {
	if b.pulled == nil {
		b.pulled = map[uint64]*pulled{}
	}
	e := b.pulled[boot]
	if e == nil {
		e = &pulled{}
		b.pulled[boot] = e
	}
	return e
}

func (b *peerBook) forget(boot uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.pulled, boot)
}

// modelEntries lists the models of all live replicas for GET /v1/models, the own ones first.
func (a *Agent) modelEntries() []proxy.ModelEntry {
	var out []proxy.ModelEntry
	a.own.mu.Lock()
	for _, m := range a.own.models {
		out = append(out, proxy.ModelEntry{ID: m.ID, Raw: m.Raw})
	}
	a.own.mu.Unlock()
	a.peers.mu.Lock()
	defer a.peers.mu.Unlock()
	for _, p := range a.table.Snapshot().Peers() {
		if e := a.peers.pulled[p.Boot()]; e != nil && !p.Self() {
			for _, m := range e.models {
				out = append(out, proxy.ModelEntry{ID: m.ID, Raw: m.Raw})
			}
		}
	}
	return out
}

// onMember takes a membership change. Gossip calls it from one goroutine, in order.
func (a *Agent) onMember(m routing.Member, ev gossip.MemberEvent) {
	now := time.Now()
	if ev.Alive() {
		a.table.SetMember(m, now)
		a.clear("alone")
		return
	}
	a.table.RemoveMember(m.Boot, now)
	a.peers.forget(m.Boot)
	a.clear("silent " + bootText(m.Boot))
}

// onReport takes a record of another member; gossip calls it on its packet goroutine.
func (a *Agent) onReport(r routing.Report) { a.table.Update(r, time.Now()) }

// pullModels fetches the model list of each member whose record shows another digest than the one fetched last.
func (a *Agent) pullModels(ctx context.Context) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxAsks)
	for {
		now := time.Now()
		for _, p := range a.table.Snapshot().Peers() {
			r, _ := p.Report()
			if p.Self() || !r.ModelsDigest.OK || !a.peers.begin(p.Boot(), r.ModelsDigest.V, now) {
				continue
			}
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				a.pull(ctx, p, r.ModelsDigest.V)
			})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// begin reports whether the list with that digest is to be fetched now, and notes that it is.
func (b *peerBook) begin(boot uint64, digest uint32, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.entry(boot)
	if e.known && e.digest == digest || e.pulling || now.Sub(e.tried) < pullRetry {
		return false
	}
	e.pulling, e.tried = true, now
	return true
}

func (a *Agent) pull(ctx context.Context, p *routing.Peer, digest uint32) {
	body, err := a.link.get(ctx, p.Boot(), pathModels, pullTimeout, maxModels)
	var models []sharedModel
	if err == nil {
		err = json.Unmarshal(body, &models)
	}
	a.peers.mu.Lock()
	e := a.peers.entry(p.Boot())
	e.pulling = false
	if err == nil {
		e.known, e.digest, e.models = true, digest, models
	}
	a.peers.mu.Unlock()
	if err != nil {
		a.log.Debug("model list of a member", KeyMember, p.Member().Node, KeyErr, err)
		return
	}
	list := make([]routing.Model, 0, len(models))
	for _, m := range models {
		list = append(list, routing.Model{ID: m.ID, ContextLength: m.ContextLength, Aliases: m.Aliases})
	}
	a.table.SetModels(p.Boot(), list, 0, time.Now())
}

// askSilent asks members that are alive by the member list, but whose records do not come, over the peer link: once a
// second, with a warning that names the member and the port to open.
func (a *Agent) askSilent(ctx context.Context) error {
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxAsks)
	warned := map[uint64]bool{}
	for first := true; ; first = false {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if first {
			a.warnAlone()
		}
		silent := map[uint64]bool{}
		for _, m := range a.node.Silent() {
			silent[m.Boot] = true
		}
		for boot := range warned {
			if !silent[boot] {
				delete(warned, boot)
				a.speaks(boot)
			}
		}
		if len(silent) == 0 {
			continue
		}
		for _, m := range a.node.Members() {
			if !silent[m.Boot] {
				continue
			}
			warned[m.Boot] = true
			wg.Go(func() {
				select {
				case slots <- struct{}{}:
					defer func() { <-slots }()
					a.ask(ctx, m)
				case <-ctx.Done():
				}
			})
		}
	}
}

// speaks takes the warning back once records come again.
func (a *Agent) speaks(boot uint64) {
	a.peers.mu.Lock()
	a.peers.entry(boot).why = ""
	a.peers.mu.Unlock()
	a.clear("silent " + bootText(boot))
}

// ask fetches one member's record.
func (a *Agent) ask(ctx context.Context, m gossip.MemberInfo) {
	b, err := a.link.get(ctx, m.Boot, pathRecord, askTimeout, 4096)
	if ctx.Err() != nil {
		return
	}
	var r routing.Report
	if err == nil {
		r, err = gossip.DecodeReport(b)
	}
	var msg, text string
	switch {
	case err == nil:
		a.table.Update(r, time.Now())
		_, port, _ := net.SplitHostPort(m.GossipAddr)
		msg = MsgUDPBlocked
		text = fmt.Sprintf("%s: %s (UDP port %s at %s)", MsgUDPBlocked, m.Node, port, m.GossipAddr)
	case noCommonKey(err):
		msg = MsgNoCommonKey
		text = fmt.Sprintf("%s: %s at %s", MsgNoCommonKey, m.Node, m.Addr)
	default:
		// It does not answer here either: membership will find out whether it is dead.
		a.log.Debug("silent member", KeyMember, m.Node, KeyErr, err)
		return
	}
	a.peers.mu.Lock()
	e := a.peers.entry(m.Boot)
	fresh := e.why != msg
	e.why = msg
	a.peers.mu.Unlock()
	a.warn("silent "+bootText(m.Boot), text)
	if fresh {
		a.log.Warn(msg, KeyMember, m.Node, KeyAddr, m.GossipAddr, KeyHint, "open TCP and UDP on the gossip port between all agents")
	}
}

// noCommonKey reports whether a connection failed because the two agents have no key in common.
func noCommonKey(err error) bool {
	_, alert := errors.AsType[tls.AlertError](err)
	return errors.Is(err, peertls.ErrNoCommonKey) || alert || strings.Contains(err.Error(), "remote error: tls:")
}

// peerClient asks other agents over the peer link. A host name in its URLs is a boot id; the address comes from the
// member list and nowhere else.
type peerClient struct {
	http   *http.Client
	scheme string
}

func newPeerClient(table *routing.Table, id *peertls.Identity) *peerClient {
	dial := func(ctx context.Context, host string) (nc net.Conn, boot uint64, err error) {
		name, _, err := net.SplitHostPort(host)
		if err != nil {
			return nil, 0, err
		}
		if boot, err = strconv.ParseUint(name, 16, 64); err != nil {
			return nil, 0, err
		}
		p := table.Peer(boot)
		if p == nil {
			return nil, 0, fmt.Errorf("no member has the boot id %s", name)
		}
		d := net.Dialer{Timeout: 500 * time.Millisecond}
		nc, err = d.DialContext(ctx, "tcp", p.Member().Addr)
		return nc, boot, err
	}
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			nc, _, err := dial(ctx, addr)
			return nc, err
		},
		DialTLSContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			nc, boot, err := dial(ctx, addr)
			if err != nil {
				return nil, err
			}
			return id.Client(ctx, nc, boot, "http/1.1")
		},
		MaxIdleConnsPerHost: 1, IdleConnTimeout: 30 * time.Second, DisableCompression: true,
	}
	c := &peerClient{http: &http.Client{Transport: t}, scheme: "http"}
	if id != nil {
		c.scheme = "https"
	}
	return c
}

// get fetches a path from the member with that boot id, at most limit bytes.
func (c *peerClient) get(ctx context.Context, boot uint64, path string, timeout time.Duration, limit int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s://%016x:1%s", c.scheme, boot, path), nil)
	if err != nil {
		return nil, err
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, limit+1))
	switch {
	case err != nil:
		return nil, err
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s: %s", path, res.Status)
	case int64(len(b)) > limit:
		return nil, fmt.Errorf("%s: more than %d bytes", path, limit)
	}
	return b, nil
}

func dialUnix(path string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
}

// peerHandler serves the peer listener: what agents ask each other, and behind it the requests that they forward. It is
// no ServeMux, which would answer an unclean path by itself.
func (a *Agent) peerHandler(requests http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == pathModels && r.Method == http.MethodGet:
			a.own.mu.Lock()
			list := modelList(a.own.models)
			a.own.mu.Unlock()
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(list) // the asker hung up
		case r.URL.Path == pathRecord && r.Method == http.MethodGet:
			w.Header().Set("Content-Type", "application/octet-stream")
			_, _ = w.Write(a.record()) // the asker hung up
		default:
			requests.ServeHTTP(w, r)
		}
	})
}

// record is the newest own record in its wire form, stamped anew.
func (a *Agent) record() []byte {
	r := a.own.report(a.proxy.Load(), a.cfg.Weight, time.Now())
	a.node.Stamp(&r)
	return gossip.EncodeReport(nil, &r)
}

// onRecord takes a record that came with an answer of another agent.
func (a *Agent) onRecord(b []byte) {
	if r, err := gossip.DecodeReport(b); err == nil {
		a.table.Update(r, time.Now())
	}
}
