package proxy

import (
	"bytes"
	"encoding/json"
	"io"
)

// An alias is another name for a model of our own engine. It travels as the client wrote it, and is replaced only in what
// the engine gets: the engine does not know it.

// rename puts the engine's name for the model into a request to our own engine, if the client used an alias. A body that
// is not kept whole, or is no plain JSON, goes on as it came: the engine judges the name itself.
func (x *exchange) rename(o *Outgoing) {
	if x.p.cfg.Alias == nil || x.req.Model == "" || !x.peek.HasModel || !x.body.complete() {
		return
	}
	to := x.p.cfg.Alias(x.req.Model)
	if to == "" {
		return
	}
	r := x.body.open()
	defer r.Close()
	was, err := io.ReadAll(r)
	if err != nil {
		return
	}
	body, ok := replaceModel(was, x.req.Model, to)
	if !ok {
		return
	}
	o.Length = int64(len(body))
	o.Reopen = func() io.ReadCloser { return io.NopCloser(bytes.NewReader(body)) }
	o.Body = o.Reopen()
}

// replaceModel replaces the value of the top-level member model where it is from; all else keeps its bytes. ok is false
// if there is none, or if the body is not one JSON object.
func replaceModel(body []byte, from, to string) (out []byte, ok bool) {
	name, err := json.Marshal(to)
	if err != nil {
		return nil, false
	}
	d := json.NewDecoder(bytes.NewReader(body))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, false
	}
	copied := int64(0)
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, false
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, false
		}
		var value string
		if key != "model" || json.Unmarshal(raw, &value) != nil || value != from {
			continue
		}
		end := d.InputOffset()
		out = append(append(out, body[copied:end-int64(len(raw))]...), name...)
		copied, ok = end, true
	}
	return append(out, body[copied:]...), ok
}
