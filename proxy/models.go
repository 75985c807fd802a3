package proxy

import (
	"cmp"
	"encoding/json"
	"slices"

	"github.com/grapevine-lb/grapevine/routing"
)

// modelEntries is the union over all live replicas: one entry for each id, the engine's own object, ordered by id so
// that all agents answer alike.
func (p *Proxy) modelEntries() []ModelEntry {
	if p.cfg.Models == nil {
		return nil
	}
	all := slices.Clone(p.cfg.Models())
	slices.SortStableFunc(all, func(a, b ModelEntry) int { return cmp.Compare(a.ID, b.ID) })
	return slices.CompactFunc(all, func(a, b ModelEntry) bool { return a.ID == b.ID })
}

// serveModels answers GET /v1/models and /v1/models/{id} from what is known, without asking anybody. It returns false
// where the request must go on: a name that a replica has without listing it, such as an alias.
func (x *exchange) serveModels() bool {
	all := x.p.modelEntries()
	if x.class.Object == "" {
		if all == nil {
			all = []ModelEntry{}
		}
		list := struct {
			Object string            `json:"object"`
			Data   []json.RawMessage `json:"data"`
		}{Object: "list", Data: make([]json.RawMessage, 0, len(all))}
		for _, m := range all {
			list.Data = append(list.Data, m.Raw)
		}
		b, err := json.Marshal(list)
		if err != nil { // an engine's object that is no JSON must not hide the others
			x.log.Warn("model list", "error", err)
			x.fail(errModelUnavailable)
			return true
		}
		x.sendJSON(b)
		return true
	}
	for _, m := range all {
		if m.ID == x.class.Object {
			x.sendJSON(m.Raw)
			return true
		}
	}
	x.req = routing.Request{Model: x.class.Object}
	if d := x.pick(); d.Peer == nil {
		x.nobody(d.Reason)
		return true
	}
	return false
}

// sendJSON answers 200 with a document of our own.
func (x *exchange) sendJSON(b []byte) {
	h := &ResponseHead{Status: 200, Length: int64(len(b)), Header: Header{{"content-type", "application/json"}}}
	x.finishHead(h)
	if x.in.Method == methodHead {
		b = nil
	}
	if x.down.Head(h, len(b) == 0) == nil && len(b) > 0 {
		_ = x.down.Write(b) // the client is gone; nothing to tell it
	}
	_ = x.down.Finish(nil)
}
