package agent

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/proxy/peertls"
	"github.com/grapevine-lb/grapevine/routing"
)

// pathPrefix begins the paths on the peer listener that are no requests.
const pathPrefix = "/grapevine/"

const (
	lookEvery   = 250 * time.Millisecond // for changed model lists
	pullTimeout = 2 * time.Second
	pullRetry   = time.Second
	maxModels   = 1 << 19 // bytes of a model list
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

// sharedModels is what an agent tells of its engine: its models, and the kinds of path that it answers.
type sharedModels struct {
	Serves []string      `json:"serves,omitempty"` // none = not known
	Models []sharedModel `json:"models"`
}

func modelList(models []engine.Model, serves routing.Service) sharedModels {
	out := make([]sharedModel, 0, len(models))
	for _, m := range models {
		out = append(out, sharedModel{m.ID, m.ContextLength, m.Aliases, m.Raw})
	}
	return sharedModels{servesNames(serves), out}
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
		out = appendEntries(out, m.ID, m.Aliases, m.Raw)
	}
	a.own.mu.Unlock()
	a.peers.mu.Lock()
	defer a.peers.mu.Unlock()
	for _, p := range a.table.Snapshot().Peers() {
		if e := a.peers.pulled[p.Boot()]; e != nil && !p.Self() {
			for _, m := range e.models {
				out = appendEntries(out, m.ID, m.Aliases, m.Raw)
			}
		}
	}
	return out
}

// appendEntries adds a model under its name and under each of its others: clients look for theirs in the list.
func appendEntries(out []proxy.ModelEntry, id string, aliases []string, raw json.RawMessage) []proxy.ModelEntry {
	out = append(out, proxy.ModelEntry{ID: id, Raw: raw})
	for _, alias := range aliases {
		out = append(out, proxy.ModelEntry{ID: alias, Raw: renamed(raw, alias)})
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
	if ev == gossip.MemberLeft {
		a.noteLeft(m.Boot, now)
	}
	a.digests.forget(m.Boot)
	a.clear("silent " + bootText(m.Boot))
}

// onReport takes a record of another member; gossip calls it on its packet goroutine.
func (a *Agent) onReport(r routing.Report) { a.update(r) }

// update puts a record into the table and wakes the thief if its sender holds requests.
func (a *Agent) update(r routing.Report) {
	if a.table.Update(r, time.Now()) && r.Held.Or(0) > 0 && r.Boot != a.boot {
		a.proxy.Wake()
	}
}

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
	body, err := a.proxy.Ask(ctx, p.Boot(), pullTimeout, proxy.AskModels, nil)
	var told sharedModels
	if err == nil {
		err = json.Unmarshal(body, &told)
	}
	models := told.Models
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
	a.table.SetModels(p.Boot(), list, servesFrom(told.Serves), time.Now())
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
	b, err := a.proxy.Ask(ctx, m.Boot, askTimeout, proxy.AskRecord, nil)
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

func dialUnix(path string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
}

// peerHandler serves the peer listener: the questions that agents ask each other, and behind them the requests that they
// forward. It is no ServeMux, which would answer an unclean path by itself.
func (a *Agent) peerHandler(requests http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == proxy.LinkPath {
			a.proxy.ServeLink(w, r)
			return
		}
		requests.ServeHTTP(w, r)
	})
}

// answer answers the questions of other agents that the proxy cannot.
func (a *Agent) answer(kind byte, payload, reply []byte) ([]byte, bool) {
	switch kind {
	case proxy.AskDigest:
		return a.answerDigest(payload, reply)
	case proxy.AskKeys:
		return a.answerKeys(payload, reply), true
	case proxy.AskModels:
	default:
		return reply, false
	}
	a.own.mu.Lock()
	list := modelList(a.own.models, a.own.serves)
	a.own.mu.Unlock()
	b, err := json.Marshal(list)
	if err != nil || len(b) > maxModels {
		a.log.Warn("the model list cannot be told to other agents", KeyErr, err, "bytes", len(b))
		return reply, false
	}
	return append(reply, b...), true
}

// record is the newest own record in its wire form, stamped anew.
func (a *Agent) record() []byte {
	r := a.report(time.Now())
	a.node.Stamp(&r)
	return gossip.EncodeReport(nil, &r)
}

// onRecord takes a record that came with an answer of the agent from; nobody speaks for another there.
func (a *Agent) onRecord(from uint64, b []byte) {
	if r, err := gossip.DecodeReport(b); err == nil && r.Boot == from {
		a.update(r)
	}
}
