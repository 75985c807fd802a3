package enginesim

import "time"

// maxRun bounds the decode steps taken at once, so that no sum of picoseconds overflows.
const maxRun = 1 << 16

// advance completes all steps that end by now, and those whole steps of a run that have passed. A step that begins exactly
// now is planned only if plan is set, so that jobs submitted at one moment share it.
func (e *Engine) advance(to time.Duration, plan bool) {
	if e.taken {
		e.events, e.taken = e.events[:0], false
	}
	now := max(e.now, fromDuration(to))
	if e.paused || e.dead {
		e.now = now
		return
	}
	for {
		if !e.busy {
			if e.waiting.len()+len(e.order) == 0 || e.idleAt > now || e.idleAt == now && !plan {
				break
			}
			e.now = max(e.now, e.idleAt)
			if !e.plan() {
				break
			}
		}
		end := e.start + e.elapsed(e.left)
		if end > now {
			e.now = max(e.now, e.start)
			e.run(e.whole(now - e.start))
			break
		}
		e.now = end
		e.complete()
		e.busy, e.idleAt = false, end
	}
	e.now = now
}

// elapsed is the duration of the next n steps.
func (e *Engine) elapsed(n int) picos {
	k := picos(n)
	return k*e.length + e.grow*(k*(k-1)/2)
}

// whole is the number of steps that are over after d.
func (e *Engine) whole(d picos) int {
	lo, hi := 0, e.left
	for lo < hi {
		if m := (lo + hi + 1) / 2; e.elapsed(m) <= d {
			lo = m
		} else {
			hi = m - 1
		}
	}
	return lo
}

// run lets n of the decode steps under way pass.
func (e *Engine) run(n int) {
	if n == 0 {
		return
	}
	d := e.elapsed(n)
	e.start += d
	e.count.Busy += time.Duration(d / 1000)
	e.length += e.grow * picos(n)
	e.left -= n
	e.step += int64(n)
	e.count.Steps += uint64(n)
	if tokens := n * len(e.decode); tokens > 0 {
		e.context += tokens
		e.used += tokens
		e.count.Generated += uint64(tokens)
		next := 0
		if e.left > 0 {
			next = len(e.decode) // room for the step under way is made at its beginning
		}
		e.cache.shrink(e.p.KVTokens - e.used - next)
	}
}

// stopRun lets the work under way end with the step that is being computed, because the next one will differ.
func (e *Engine) stopRun() {
	if e.busy && e.left > 1 {
		e.run(e.whole(e.clock() - e.start))
		e.left = 1
	}
}

// plan starts the next step at e.now: one token for each decoding sequence, then prompts that have begun, then new ones.
func (e *Engine) plan() bool {
	for len(e.decode) > 0 && !e.fits(len(e.decode)) {
		if !e.preemptLast() {
			break
		}
	}
	e.chunks = e.chunks[:0]
	budget, pairs := e.p.Budget-len(e.decode), 0
	for _, s := range e.prefill {
		if budget <= 0 {
			break
		}
		pairs += e.addChunk(s, &budget)
	}
	for budget > 0 && e.waiting.len() > 0 && len(e.order) < e.p.Slots {
		s := e.waiting.front()
		if !e.admit(s) {
			break
		}
		e.waiting.pop()
		e.order = append(e.order, s)
		e.prefill = append(e.prefill, s)
		pairs += e.addChunk(s, &budget)
	}
	n := len(e.decode)
	tokens := e.p.Budget - n - budget
	if tokens == 0 && n == 0 {
		return false
	}
	e.busy, e.start, e.decoded = true, e.now, n
	e.length, e.grow, e.left = e.cost.step(tokens, n, e.context, pairs), 0, 1
	if len(e.chunks) == 0 && e.streams == 0 {
		// Nothing but decoding, and nobody wants to hear of each token: all steps up to the first end, or to
		// the point at which KV space must be made, differ only by the context that grows.
		room := (e.p.KVTokens - e.used) / n
		e.left = max(1, min(int(e.decode[0].until-e.step), room, maxRun))
		e.grow = e.cost.kv * picos(n)
	}
	return true
}

// addChunk plans as much of a prompt as the budget allows and returns its pairs, doubled.
func (e *Engine) addChunk(s *sequence, budget *int) int {
	n := min(s.todo, *budget)
	*budget -= n
	e.chunks = append(e.chunks, chunk{s, s.gen, n})
	return n * (2*(s.prompt-s.todo) + n)
}

// complete applies the work under way at its end.
func (e *Engine) complete() {
	e.run(e.left)
	at := e.now.ceil()
	for len(e.decode) > 0 && e.decode[0].until <= e.step {
		s := e.decode[0]
		tokens := e.generated(s)
		e.leave(s)
		e.finish(s, at, tokens)
	}
	if e.streams > 0 && e.decoded > 0 {
		for _, s := range e.decode {
			if s.job.Stream {
				e.emit(Event{Kind: Token, Job: s.job.ID, At: at, Tokens: e.generated(s)})
			}
		}
	}
	for _, c := range e.chunks {
		if s := c.seq; s.gen == c.gen && s.state == seqPrefill {
			s.todo -= c.tokens
			s.pending -= c.tokens
			e.pending -= c.tokens
			e.count.Prefilled += uint64(c.tokens)
			if s.todo == 0 {
				e.prefilled(s, at)
			}
		}
	}
}

// prefilled moves a sequence whose prompt is computed on to decoding. The same step has made its next token.
func (e *Engine) prefilled(s *sequence, at time.Duration) {
	e.publish(s)
	if s.job.Output == 0 {
		e.leave(s)
		e.finish(s, at, 0)
		return
	}
	s.got++
	e.count.Generated++
	if !s.hasFirst {
		s.hasFirst = true
		e.count.FirstTokens++
		e.emit(Event{Kind: First, Job: s.job.ID, At: at, Tokens: s.got})
	} else if s.job.Stream {
		e.emit(Event{Kind: Token, Job: s.job.ID, At: at, Tokens: s.got})
	}
	if s.got >= s.job.Output {
		e.leave(s)
		e.finish(s, at, s.got)
		return
	}
	e.prefill = without(e.prefill, s)
	s.state, s.since, s.until = seqDecode, e.step, e.step+int64(s.job.Output-s.got)
	e.context += s.prompt
	if s.job.Stream {
		e.streams++
	}
	e.decode.push(s)
}

func (e *Engine) finish(s *sequence, at time.Duration, tokens int) {
	e.emit(Event{Kind: Done, Job: s.job.ID, At: at, Tokens: tokens})
	e.count.Done++
	e.put(s)
}

// leave takes a running sequence out of the batch and gives back its KV tokens. What it generated stays in s.got.
func (e *Engine) leave(s *sequence) {
	if s.state == seqDecode {
		e.decode.remove(s)
		if s.job.Stream {
			e.streams--
		}
		n := int(e.step - s.since)
		s.got += n
		e.context -= s.prompt + n
		e.used -= n
	} else {
		e.prefill = without(e.prefill, s)
	}
	e.order = without(e.order, s)
	e.used -= s.private
	s.private = 0
	for i := len(s.nodes) - 1; i >= 0; i-- { // the deepest block becomes the least recent: it goes first
		e.used -= e.cache.unref(s.nodes[i])
	}
	s.nodes = s.nodes[:0]
	s.state = seqWaiting
}

// fits evicts idle blocks until n more KV tokens have room; false if there is none even then.
func (e *Engine) fits(n int) bool {
	if e.used+n > e.p.KVTokens {
		return false
	}
	e.cache.shrink(e.p.KVTokens - e.used - n)
	return true
}

// preemptLast sends the youngest running sequence back to the head of the queue; what it has is computed again later.
// The last one alone is never preempted: its context fits the cache.
func (e *Engine) preemptLast() bool {
	if len(e.order) < 2 {
		return false
	}
	s := e.order[len(e.order)-1]
	e.leave(s)
	e.count.Preemptions++
	s.prompt = s.job.Prompt + s.got
	s.todo = 0
	e.pending += s.prompt - s.pending
	s.pending = s.prompt
	s.preempted = true
	e.preempted++
	e.waiting.pushFront(s)
	e.emit(Event{Kind: Preempted, Job: s.job.ID, At: e.now.ceil(), Tokens: s.got})
	return true
}

// admit gives a waiting sequence the KV tokens for its prompt, cached blocks first. A hundredth of the cache stays free
// for the decodes, unless the engine is empty.
func (e *Engine) admit(s *sequence) bool {
	hit, cached, revived := e.cache.match(s.job.Blocks), 0, 0
	for _, h := range s.job.Blocks[:hit] {
		i := e.cache.index[h]
		n := &e.cache.nodes[i]
		s.nodes = append(s.nodes, i)
		cached += int(n.tokens)
		if n.refs == 0 {
			revived += int(n.tokens)
		}
	}
	need := max(0, s.prompt-cached)
	if e.used+revived+need > e.p.KVTokens-e.p.KVTokens/100 && len(e.order) > 0 {
		s.nodes = s.nodes[:0]
		return false
	}
	for _, i := range s.nodes {
		e.used += e.cache.ref(i)
	}
	e.used += need
	e.cache.shrink(e.p.KVTokens - e.used)
	s.private = need
	// The last prompt token is computed in any case, for its output is wanted.
	cached = min(cached, s.prompt-1)
	s.todo = s.prompt - cached
	e.pending += s.todo - s.pending
	s.pending = s.todo
	s.state = seqPrefill
	if s.preempted {
		s.preempted = false
		e.preempted--
	}
	e.count.Queried += uint64(s.prompt)
	e.count.Cached += uint64(cached)
	e.emit(Event{Kind: Started, Job: s.job.ID, At: e.now.ceil(), Tokens: s.got, Cached: cached})
	return true
}

// publish turns a computed prompt's private tokens into blocks that others may share.
func (e *Engine) publish(s *sequence) {
	for i := len(s.nodes); i < len(s.job.Blocks); i++ {
		tokens := min(e.p.BlockTokens, s.job.Prompt-i*e.p.BlockTokens)
		if tokens <= 0 {
			return
		}
		if n, ok := e.cache.index[s.job.Blocks[i]]; ok { // somebody computed the same meanwhile
			e.used += e.cache.ref(n)
			s.nodes = append(s.nodes, n)
		} else {
			s.nodes = append(s.nodes, e.cache.add(s.job.Blocks[i], tokens))
			e.used += tokens
		}
		e.used -= tokens
		s.private -= tokens
	}
}
