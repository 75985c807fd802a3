// Package engine reads one inference engine: how much it runs, what waits, how full its KV cache is, which models
// it has, whether it is healthy, and what it can do. There is one table file per engine (vllm.go, sglang.go, ...);
// everything else is machinery that the tables share.
//
// A reading never guesses. A number that the engine does not print, prints as NaN, or that is too old is unknown,
// with the reason beside it for the status page; it is never zero.
//
// A [Reader] calls only the pages that its table lists, plus the health page and the model list, at the pace of its
// caller, and never on behalf of a request. The exceptions are [Reader.Detect], which looks around once, and
// [Reader.WarmUp], which is a real request.
//
// # Concurrency
//
// All methods of a [Reader] may be called from several goroutines. Read, and only Read, is serialised: two calls at
// once wait for each other. The package starts no goroutine of its own.
//
// # Custom mappings
//
// GRAPEVINE_ENGINE_METRICS names where numbers come from, for an engine without a table or with renamed metrics; see
// [ParseMapping] for the grammar and examples.
package engine
