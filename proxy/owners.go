package proxy

import (
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/proxy/link"
	"github.com/grapevine-lb/grapevine/routing"
)

// Objects that an engine keeps (responses, files, batches, …) are known to it alone: requests that name one go back to
// the replica that made it, and are never sent a second time. Each agent keeps the ids of its own engine's answers, and
// asks the others "yours?" for those that it does not know. Nothing is promised across restarts.
const (
	ownedMost  = 10_000
	ownedFor   = time.Hour
	ownerLimit = 50 * time.Millisecond // for the answers of all
	ownerPeers = 512                   // asked at most
)

// owners are the ids of the objects that our own engine made.
type owners struct {
	mu    sync.Mutex
	until map[string]time.Time
	order []string // oldest first
	asked atomic.Uint64
	found atomic.Uint64
}

func (o *owners) note(id string, now time.Time) {
	if id == "" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.until == nil {
		o.until = make(map[string]time.Time)
	}
	if _, again := o.until[id]; !again {
		o.order = append(o.order, id)
	}
	o.until[id] = now.Add(ownedFor)
	for len(o.order) > ownedMost || now.After(o.until[o.order[0]]) {
		delete(o.until, o.order[0])
		o.order = o.order[1:]
	}
}

func (o *owners) has(id string, now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	t, ok := o.until[id]
	return ok && now.Before(t)
}

// made notes the object that an answer of our own engine is about.
func (x *exchange) made(a *attempt, status int) {
	if id := x.sift.scan.id; a.self && (status == 200 || status == 201) && id != "" {
		x.p.owners.note(id, time.Now())
	}
}

// makes reports whether answers are about a stored object, so that their ids are kept.
func (c *pathClass) makes() bool {
	return c.Kind == pathStateful || strings.HasSuffix(c.Route, "/responses")
}

// inputFile finds the file that a new batch reads.
var inputFile = regexp.MustCompile(`"input_file_id"\s*:\s*"([^"\\]{1,128})"`)

// object is the id of the stored object that the request needs, or "".
func (x *exchange) object() string {
	switch {
	case x.class.Kind == pathStateful && x.class.Object != "":
		return x.class.Object
	case x.peek.PreviousResponseID != "":
		return x.peek.PreviousResponseID
	case x.class.Kind == pathStateful && x.in.Method == "POST" && x.body.complete() && x.body.n <= keepAlways:
		var all []byte
		for _, b := range x.body.blocks {
			all = append(all, b...)
		}
		if m := inputFile.FindSubmatch(all); m != nil {
			return string(m[1])
		}
	}
	return ""
}

// owner returns where a request goes that needs a stored object; ok false: it needs none, or nobody knows the object,
// and the choice is as for any other.
func (x *exchange) owner() (d choice, ok bool) {
	id := x.object()
	if id == "" {
		return d, false
	}
	p := x.p
	peer := p.cfg.Table.Self()
	if !p.owners.has(id, x.arrived) {
		if peer = x.askOwner(id); peer == nil {
			return d, false
		}
	}
	x.pinned, x.fixed = true, true
	return choice{Peer: peer, Tokens: x.req.PromptTokens, Reason: routing.ReasonOwner}, true
}

// askOwner asks all other agents whether the object is theirs; the first that says so is it.
func (x *exchange) askOwner(id string) *routing.Peer {
	p := x.p
	deadline := time.Now().Add(ownerLimit)
	peers := p.cfg.Table.Snapshot().Peers()
	out := make(chan link.Result, ownerPeers)
	var forget []func()
	defer func() {
		for _, f := range forget {
			f()
		}
	}()
	under := 0
	for i, peer := range peers {
		if peer.Self() || peer.Member().Version < routing.AskVersion || under == ownerPeers {
			continue
		}
		if q := p.questions.to(peer); q != nil {
			forget = append(forget, q.client.Go(deadline, AskOwner, []byte(id), i, out))
			under++
		}
	}
	p.owners.asked.Add(1)
	timer := time.NewTimer(ownerLimit)
	defer timer.Stop()
	for ; under > 0; under-- {
		select {
		case r := <-out:
			if r.Err == nil && len(r.Reply) == 1 && r.Reply[0] == 1 {
				p.owners.found.Add(1)
				return peers[r.Index]
			}
		case <-timer.C:
			return nil
		case <-x.ctx.Done():
			return nil
		}
	}
	return nil
}

// answerOwner answers 1 if our engine made the object, else 0.
func (p *Proxy) answerOwner(payload, reply []byte) ([]byte, bool) {
	if p.owners.has(string(payload), time.Now()) {
		return append(reply, 1), true
	}
	return append(reply, 0), true
}
