// Package enginesim is a believable inference engine without a model.
//
// It comes in two layers. [Engine] is the pure model: continuous batching in virtual time with a token budget per step,
// decodes first, chunked prefill, a limited number of running sequences, KV-cache capacity with preemption by
// recomputation, and an LRU prefix cache whose blocks are shared with running requests. It has no goroutine, no clock and
// no randomness; the caller tells it what time it is. A million requests over 64 engines take a few seconds.
//
//	e := enginesim.New(enginesim.DefaultParams())
//	e.Submit(0, enginesim.Job{ID: 1, Prompt: 2000, Output: 100})
//	for at, ok := e.NextEvent(); ok; at, ok = e.NextEvent() {
//		for _, ev := range e.Advance(at) {
//			fmt.Println(ev.At, ev.Kind, ev.Job, ev.Tokens)
//		}
//	}
//
// [Server] drives one Engine by the real clock (or the fake one of testing/synctest) behind the HTTP API of vLLM, SGLang or
// llama.cpp: streams, usage, metrics page, error shapes, and the ways in which the real ones hang up and die. Its text is a
// pure function of the model's seed and of everything that stands before it, so an answer that is broken off and continued
// elsewhere must equal the uninterrupted one to the byte. Faults are injected with [Server.Inject].
//
// An Engine belongs to one goroutine at a time. All methods of Server may be called from any goroutine; [Server.Run] is its
// only goroutine, besides one for each request that net/http starts, and timers for delayed hang-ups and ends of faults.
package enginesim
