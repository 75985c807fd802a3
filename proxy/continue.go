package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/grapevine-lb/grapevine/routing"
)

// A stream that breaks after content goes on at another replica where that is exact (design section 6.8): the text that
// the client has is given to the next engine as the beginning of its answer, and what comes then is made to look like
// the rest of the same stream.

// Continuation is what must be known of a kind of engine before it may go on with a text begun elsewhere.
type Continuation struct {
	// Chat: a trailing assistant message is continued exactly, with Fields added to the body.
	Chat bool
	// Fields are JSON members without braces; "" = the engine continues by itself.
	Fields string
	// Opens: a trailing assistant message is taken for an open turn without any field.
	Opens bool
	// Completions: a completion goes on when its text is appended to the prompt.
	Completions bool
	// TokenizePath counts tokens: TokenizeBody makes the request, TokenizeCount reads the answer. "" = it cannot.
	TokenizePath  string
	TokenizeBody  func(model, text string) ([]byte, error)
	TokenizeCount func(answer []byte) (int, error)
}

const (
	continueText    = 1 << 20                // bytes of text that are kept of a stream; a longer one is not continued
	continueDeaths  = 2                      // unannounced deaths that a stream with content survives
	continueFor     = 5 * time.Second        // longest wait for a usable replica, from the break
	continueLook    = 50 * time.Millisecond  // between two looks
	continueMisfits = 2                      // engines that may refuse the continuation itself before it is given up
	tokenizeWait    = 500 * time.Millisecond // longest wait for a count; then the counted events must do
	tokenizeMost    = 16 << 20               // bytes of an answer with token numbers
)

// Why a stream had to go on elsewhere; labels of grapevine_continues_total.
const (
	continueReset = "reset" // the connection ended early
	continueHang  = "hang"  // silence past the limit
	continueAbort = "abort" // the engine said that it gave up
	continueError = "error" // an error object of the engine in the stream
	continueDrain = "drain" // the replica must be empty
)

// How that ended; the other label.
const (
	continuedWhole  = "ok"
	continuedCancel = "client_cancel"
	continuedFailed = "failed"
)

// continueLabels are all pairs of reason and outcome, separated by a blank.
func continueLabels() (out []string) {
	for _, r := range []string{continueReset, continueHang, continueAbort, continueError, continueDrain} {
		for _, o := range []string{continuedWhole, continuedCancel, continuedFailed} {
			out = append(out, r+" "+o)
		}
	}
	return out
}

// continuation is a stream whose rest comes from elsewhere.
type continuation struct {
	on     bool      // the leg under way, or looked for, is not the first
	since  time.Time // when the newest leg broke
	reason string    // why the newest leg broke
	deaths int       // unannounced, since there was content
	text   []byte    // what the client has, of all legs
	sent   int       // its tokens, counted by events
	prompt routing.Opt[int]
	ended  bool // a finish reason is out

	counted int      // tokens of text as the present target counts them
	body    []byte   // the present leg's request
	first   object   // the first event of the first leg
	events  []byte   // a piece of a later leg, rewritten
	busy    []uint64 // replicas that refused the rest only for the moment
	swallow bool     // the empty line behind an event that was left out
}

// goesOn reports whether the leg under way, or looked for, is not the first.
func (x *exchange) goesOn() bool { return x.cont != nil && x.cont.on }

// mayContinue settles at a stream's head whether its text is kept.
func (x *exchange) mayContinue(a *attempt) {
	if x.goesOn() {
		return
	}
	p := x.p
	if p.cfg.Continue == nil || x.role != roleEntry || !x.peek.Continuable || !x.peek.Stream || !x.body.complete() {
		return
	}
	switch x.class.Route {
	case "/v1/chat/completions", "/v1/completions":
	default:
		return
	}
	x.mayGoOn = true
	x.openTurn = x.peek.LastRole == "assistant" && p.cfg.Continue(x.kindOf(a.peer)).Opens
	x.sift.scan.keepText = continueText
	x.sift.strict = true
}

// kindOf is the kind of engine behind a peer.
func (x *exchange) kindOf(p *routing.Peer) string {
	if p.Boot() == x.p.self && x.p.cfg.EngineKind != nil {
		return x.p.cfg.EngineKind()
	}
	return p.Member().Engine
}

// broken is the end of an answer that has begun and is not whole: its rest is looked for elsewhere, or it ends with v's error.
func (x *exchange) broken(v verdict, reason string) verdict {
	lost := false
	if x.mayGoOn && x.content {
		_, whole := x.sift.scan.said()
		lost = !whole || x.sift.scan.seen()&(eventRich|eventMalformed) != 0
	}
	if !x.mayGoOn || !x.content || lost || x.ctx.Err() != nil || !x.body.again() {
		return x.breakOff(v)
	}
	if x.cont == nil {
		x.cont = new(continuation)
	}
	x.cont.reason = reason
	return verdictResume
}

// goOn has the rest of a broken stream come from elsewhere. d is where it broke.
func (x *exchange) goOn(d choice) {
	c := x.cont
	was := x.tried
	x.first = tighter(x.first, x.idle) // the client has been told that it is being answered
	x.takeLeg(d.Peer)
	out := continuedFailed
	if x.anyNext(d) {
		switch {
		case x.outcome == outcomeCancel:
			out = continuedCancel
		case x.outcome == "" || x.outcome == outcomeOK:
			out = continuedWhole
		}
	} else if x.ctx.Err() != nil {
		out = continuedCancel
		x.stopped()
	} else {
		v := verdictBroken
		if len(x.sift.bad) > 0 {
			v = verdictError
		}
		x.breakOff(v)
	}
	x.p.metrics.continues.add(c.reason + " " + out)
	x.log.Info("stream continued", "id", x.id, "reason", c.reason, "outcome", out, "attempts", len(x.tried)-len(was)+1)
}

// anyNext tries one replica after another and reports whether the exchange has come to its end. Otherwise the client waits
// behind whole events.
func (x *exchange) anyNext(d choice) bool {
	c := x.cont
	if c.ended {
		return x.endEnded()
	}
	misfits := 0
	for c.deaths <= continueDeaths && misfits < continueMisfits && len(x.tried) < cap(x.tries) {
		x.tried = append(x.tried, d.Peer.Boot())
		if d = x.nextFit(); d.Peer == nil {
			return false
		}
		if c.spent(x.peek.MaxTokens) && x.finishSpent() {
			return true
		}
		v := x.try(&d)
		for v == verdictMoved {
			if x.moves++; x.moves > maxMoves {
				return false
			}
			if d = x.after(); d.Peer == nil || !x.fits(d.Peer) {
				return false
			}
			v = x.try(&d)
		}
		switch v {
		case verdictDone, verdictGone:
			return true
		case verdictResume:
			x.p.metrics.continues.add(c.reason + " " + continuedFailed) // this leg's own break; the stream may still be saved
			x.takeLeg(d.Peer)
			if c.ended {
				return x.endEnded()
			}
		case verdictCut, verdictTimeout, verdictError:
			if !x.announced(d.Peer) && x.leg != routing.OutcomeCancelled {
				c.deaths++
			}
		case verdictRefused, verdictBusy:
			c.busy = append(c.busy, d.Peer.Boot())
		case verdictBroken, verdictFailed:
			misfits++
		}
	}
	return false
}

// nextFit picks a replica that was not tried and can go on. Where none is usable at the moment, as in the second after a
// restart, or all that are have refused, it waits a little: the client has been told that it is being answered.
func (x *exchange) nextFit() choice {
	c := x.cont
	for {
		d := x.pick()
		switch {
		case d.Peer != nil && x.fits(d.Peer):
			return d
		case d.Peer != nil:
			if x.tried = append(x.tried, d.Peer.Boot()); len(x.tried) >= cap(x.tries) {
				return choice{}
			}
			continue
		case d.Reason == routing.ReasonAllTried && len(c.busy) == 0, time.Since(c.since) >= continueFor:
			return d
		}
		t := time.NewTimer(continueLook)
		select {
		case <-x.ctx.Done():
			t.Stop()
			return choice{}
		case <-t.C:
		}
		x.tried = slices.DeleteFunc(x.tried, func(b uint64) bool { return slices.Contains(c.busy, b) })
		c.busy, x.req.Full = c.busy[:0], false
	}
}

// takeLeg adds what the broken leg has said. p is where it ran.
func (x *exchange) takeLeg(p *routing.Peer) {
	c, s := x.cont, &x.sift
	if !c.on {
		c.first, _ = parseObject(firstData(s.first))
		c.on = true
	}
	if u := &s.scan.usage; u.Prompt.OK && !c.prompt.OK && len(c.text) == 0 {
		c.prompt = u.Prompt
	}
	c.since = time.Now()
	c.text = append(c.text, s.scan.plain[:s.said]...)
	c.sent += s.tokens
	c.ended = c.ended || s.went&eventFinish != 0
	x.p.metrics.outputTokens.Add(uint64(s.tokens))
	x.req.PromptTokens += s.tokens
	if c.reason != continueAbort && c.reason != continueDrain && !x.announced(p) {
		c.deaths++
	}
}

// waits is from when the wait for an engine counts: the request's arrival, or the moment at which its stream broke.
func (x *exchange) waits() time.Time {
	if x.goesOn() {
		return x.cont.since
	}
	return x.arrived
}

// endEnded ends a stream whose finish reason is out: nothing but the usage and the end marker can be missing.
func (x *exchange) endEnded() bool {
	if x.peek.IncludeUsage {
		return false
	}
	return x.endWith(nil)
}

// endWith writes the last events of ours and ends the answer as a whole one.
func (x *exchange) endWith(b []byte) bool {
	if x.down.Write(append(b, "data: [DONE]\n\n"...)) != nil || x.down.Finish(nil) != nil {
		x.stopped()
	}
	return true
}

// fits makes the request for a replica that is to go on with the text; false if its engine cannot.
func (x *exchange) fits(p *routing.Peer) bool {
	c := x.cont
	ab := x.p.cfg.Continue(x.kindOf(p))
	chat := x.class.Service&routing.ServeChat != 0
	if chat && !ab.Chat || !chat && !ab.Completions || !utf8.Valid(c.text) {
		return false
	}
	c.counted = c.sent
	if x.peek.MaxTokens > 0 || x.peek.IncludeUsage {
		if n, err := x.countTokens(p, &ab); err == nil {
			c.counted = n
		}
	}
	left := 0
	if x.peek.MaxTokens > 0 {
		left = max(1, x.peek.MaxTokens-c.counted)
	}
	r := x.body.open()
	was, err := io.ReadAll(r)
	_ = r.Close()
	if err != nil {
		return false
	}
	body, err := continueBody(was, chat, x.openTurn, string(c.text), left, ab.Fields)
	if err != nil {
		x.log.Debug("continuation", "id", x.id, "error", err)
		return false
	}
	c.body = body
	return true
}

// continued gives a request the present leg's body.
func (x *exchange) continued(o *Outgoing, self bool) {
	body := x.cont.body
	if self && x.p.cfg.Alias != nil {
		if to := x.p.cfg.Alias(x.req.Model); to != "" {
			if b, ok := replaceModel(body, x.req.Model, to); ok {
				body = b
			}
		}
	}
	o.Length = int64(len(body))
	o.Reopen = func() io.ReadCloser { return io.NopCloser(bytes.NewReader(body)) }
	o.Body = o.Reopen()
}

// spent reports whether the client has all tokens that it asked for, by the newest count.
func (c *continuation) spent(most int) bool { return most > 0 && c.counted >= most }

// finishSpent ends a stream to whose end only the finish chunk is missing, the one chunk that we ever write ourselves.
func (x *exchange) finishSpent() bool {
	b := x.cont.first.finishChunk(x.class.Service&routing.ServeChat != 0)
	return b != nil && x.endWith(b)
}

// countTokens asks the target's engine how many tokens the text has.
func (x *exchange) countTokens(p *routing.Peer, ab *Continuation) (int, error) {
	if ab.TokenizePath == "" {
		return 0, errors.ErrUnsupported
	}
	model := x.req.Model
	self := p.Boot() == x.p.self
	if self && x.p.cfg.Alias != nil {
		if to := x.p.cfg.Alias(model); to != "" {
			model = to
		}
	}
	body, err := ab.TokenizeBody(model, string(x.cont.text))
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(x.ctx, tokenizeWait)
	defer cancel()
	a := &attempt{p: x.p, peer: p, self: self}
	x.cont.body = body
	o := x.outgoing(a, time.Now())
	x.cont.body = nil
	o.Method, o.Target = "POST", ab.TokenizePath
	o.Header.Del(headerStages)
	o.Header.Set("content-type", "application/json")
	ans, err := x.upstream(a).Send(ctx, o)
	if err != nil {
		return 0, err
	}
	defer ans.Body.Close()
	b, err := io.ReadAll(io.LimitReader(ans.Body, tokenizeMost))
	if err != nil {
		return 0, err
	}
	if ans.Head.Status != 200 {
		return 0, errors.New("status " + strconv.Itoa(ans.Head.Status))
	}
	return ab.TokenizeCount(b)
}

// continueBody makes the request that goes on with text. left is how many tokens may still come, 0 = no limit was set.
// open: the client's last message is an open turn of the assistant, which text belongs to.
func continueBody(was []byte, chat, open bool, text string, left int, fields string) ([]byte, error) {
	o, err := parseObject(was)
	if err != nil {
		return nil, err
	}
	said, err := json.Marshal(text)
	if err != nil {
		return nil, err
	}
	if chat {
		var messages []json.RawMessage
		if err := json.Unmarshal(o.get("messages"), &messages); err != nil || len(messages) == 0 {
			return nil, errors.Join(errNoText, err)
		}
		if open {
			last, err := appendText(messages[len(messages)-1], text)
			if err != nil {
				return nil, err
			}
			messages[len(messages)-1] = last
		} else {
			messages = append(messages, json.RawMessage(`{"role":"assistant","content":`+string(said)+`}`))
		}
		b, err := json.Marshal(messages)
		if err != nil {
			return nil, err
		}
		o.set("messages", b)
		if fields != "" {
			more, err := parseObject([]byte("{" + fields + "}"))
			if err != nil {
				return nil, err
			}
			for _, m := range more {
				o.set(m.key, m.raw)
			}
		}
	} else {
		var prompt string
		if err := json.Unmarshal(o.get("prompt"), &prompt); err != nil {
			return nil, errors.Join(errNoText, err)
		}
		b, err := json.Marshal(prompt + text)
		if err != nil {
			return nil, err
		}
		o.set("prompt", b)
	}
	if left > 0 {
		for _, name := range []string{"max_tokens", "max_completion_tokens"} {
			if raw := o.get(name); raw != nil && string(raw) != "null" {
				o.set(name, strconv.AppendInt(nil, int64(left), 10))
			}
		}
	}
	return o.bytes(), nil
}

var errNoText = errors.New("the request's text is not where it should be")

// appendText adds text to a message's content: a string, or parts of which the last text takes it.
func appendText(message json.RawMessage, text string) (json.RawMessage, error) {
	m, err := parseObject(message)
	if err != nil {
		return nil, err
	}
	var content string
	if json.Unmarshal(m.get("content"), &content) == nil {
		b, err := json.Marshal(content + text)
		m.set("content", b)
		return m.bytes(), err
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(m.get("content"), &parts); err != nil || len(parts) == 0 {
		return nil, errors.Join(errNoText, err)
	}
	part, err := parseObject(parts[len(parts)-1])
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(part.get("text"), &content); err != nil {
		return nil, errors.Join(errNoText, err)
	}
	b, err := json.Marshal(content + text)
	if err != nil {
		return nil, err
	}
	part.set("text", b)
	parts[len(parts)-1] = part.bytes()
	if b, err = json.Marshal(parts); err != nil {
		return nil, err
	}
	m.set("content", b)
	return m.bytes(), nil
}

// rewrite makes whole events of a later leg look like the first leg's: its ids and creation time, no second role, and the
// usage of the whole answer. What it returns is good until the next call.
func (c *continuation) rewrite(p []byte) []byte {
	out := c.events[:0]
	for len(p) > 0 {
		n := bytes.IndexByte(p, '\n') + 1
		if n == 0 {
			n = len(p)
		}
		line := p[:n]
		p = p[n:]
		bare := bytes.TrimRight(line, "\r\n")
		if len(bare) == 0 && c.swallow {
			c.swallow = false
			continue
		}
		doc, ok := bytes.CutPrefix(bare, []byte("data:"))
		doc = bytes.TrimSpace(doc)
		if !ok || len(doc) == 0 || doc[0] != '{' {
			out = append(out, line...)
			continue
		}
		doc, keep := c.rewriteDoc(doc)
		if !keep {
			c.swallow = true
			continue
		}
		out = append(append(out, "data: "...), doc...)
		out = append(out, line[len(bare):]...)
	}
	c.events = out
	return out
}

// rewriteDoc rewrites one event's document; keep is false for one that only opens an answer.
func (c *continuation) rewriteDoc(doc []byte) (_ []byte, keep bool) {
	o, err := parseObject(doc)
	if err != nil {
		return doc, true
	}
	for _, name := range []string{"id", "created", "model", "system_fingerprint"} {
		if raw := c.first.get(name); raw != nil && o.get(name) != nil {
			o.set(name, raw)
		}
	}
	var choices []json.RawMessage
	if json.Unmarshal(o.get("choices"), &choices) == nil && len(choices) == 1 {
		choice, err := parseObject(choices[0])
		if err != nil {
			return doc, true
		}
		delta, err := parseObject(choice.get("delta"))
		if err == nil && delta.get("role") != nil {
			var text string
			_ = json.Unmarshal(delta.get("content"), &text)
			finish := choice.get("finish_reason")
			if text == "" && (finish == nil || string(finish) == "null") {
				return nil, false
			}
			delta.del("role")
			choice.set("delta", delta.bytes())
			choices[0] = choice.bytes()
			if b, err := json.Marshal(choices); err == nil {
				o.set("choices", b)
			}
		}
	}
	if usage, err := parseObject(o.get("usage")); err == nil {
		o.set("usage", c.rewriteUsage(usage))
	}
	return o.bytes(), true
}

// rewriteUsage turns a later leg's usage into that of the whole answer: what was sent before counts as answer, not as prompt.
func (c *continuation) rewriteUsage(u object) json.RawMessage {
	var prompt, completion int
	if json.Unmarshal(u.get("prompt_tokens"), &prompt) != nil || json.Unmarshal(u.get("completion_tokens"), &completion) != nil {
		return u.bytes()
	}
	total := prompt + completion
	prompt = max(1, prompt-c.counted)
	if c.prompt.OK {
		prompt = min(c.prompt.V, total)
	}
	number := func(n int) json.RawMessage { return strconv.AppendInt(nil, int64(n), 10) }
	u.set("prompt_tokens", number(prompt))
	u.set("completion_tokens", number(total-prompt))
	if u.get("total_tokens") != nil {
		u.set("total_tokens", number(total))
	}
	if d, err := parseObject(u.get("prompt_tokens_details")); err == nil {
		var cached int
		if json.Unmarshal(d.get("cached_tokens"), &cached) == nil && cached > prompt {
			d.set("cached_tokens", number(prompt))
			u.set("prompt_tokens_details", d.bytes())
		}
	}
	return u.bytes()
}

// firstData is the document of an event.
func firstData(event []byte) []byte {
	for line := range bytes.Lines(event) {
		if doc, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data:")); ok {
			return bytes.TrimSpace(doc)
		}
	}
	return nil
}

// finishChunk is the chunk that ends an answer at its token limit, in the shape of the first one; nil if that is unknown.
func (o object) finishChunk(chat bool) []byte {
	if len(o) == 0 {
		return nil
	}
	c := append(object(nil), o...)
	choice := `[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]`
	if chat {
		choice = `[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]`
	}
	c.set("choices", json.RawMessage(choice))
	if c.get("usage") != nil {
		c.set("usage", json.RawMessage("null"))
	}
	return append(append([]byte("data: "), c.bytes()...), "\n\n"...)
}

// object is a JSON object whose members keep their order and bytes. A name that comes twice has its last value, as
// engines read it.
type object []member

type member struct {
	key string
	raw json.RawMessage
}

var errNoObject = errors.New("not a JSON object")

func parseObject(b []byte) (object, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errNoObject
	}
	var o object
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, err
		}
		key, _ := t.(string)
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, err
		}
		o.set(key, raw)
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	return o, nil
}

func (o object) get(key string) json.RawMessage {
	for i := range o {
		if o[i].key == key {
			return o[i].raw
		}
	}
	return nil
}

func (o *object) set(key string, raw json.RawMessage) {
	for i := range *o {
		if (*o)[i].key == key {
			(*o)[i].raw = raw
			return
		}
	}
	*o = append(*o, member{key, raw})
}

func (o *object) del(key string) {
	for i := range *o {
		if (*o)[i].key == key {
			*o = append((*o)[:i], (*o)[i+1:]...)
			return
		}
	}
}

func (o object) bytes() json.RawMessage {
	b := []byte{'{'}
	for i := range o {
		if i > 0 {
			b = append(b, ',')
		}
		key, err := json.Marshal(o[i].key)
		if err != nil { // strings always marshal
			panic(err)
		}
		b = append(append(append(b, key...), ':'), o[i].raw...)
	}
	return append(b, '}')
}
