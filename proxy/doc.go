// Package proxy takes OpenAI traffic in, has it answered by the best replica, and streams all the way.
//
// # A request
//
// [Proxy.ClientHandler] takes requests of API clients; this agent is then their entry agent. It reads the body
// (body.go looks at it on the way), asks the [routing.Policy] where the request goes, and sends it to its own engine
// or to the agent of another replica, whose [Proxy.PeerHandler] gives it to its engine: never more than one hop.
// The answer is relayed piece by piece as it comes, its bytes unchanged. Only the entry agent decides about trying
// elsewhere (retry.go); a target says honestly how it went and decides nothing.
//
//	admit → read and peek → pick → begin → send → judge the head → relay → end
//
// # Shape
//
// The core (exchange.go, forward.go, relay.go, upgrade.go) knows no HTTP library: it works on [RequestHead],
// [ResponseHead], a [Downstream] and an [Upstream]. The files nethttp_*.go put net/http on both sides; another front
// can be put beside it. Work for our own engine, of both roles, passes through one place, exchange.try, where counts
// go up before and down after it, once each on every path.
//
// # Choosing together
//
// Agents put small questions to each other over one upgraded connection each (questions.go, package link): the exact
// score of a request before it is sent (ask.go, 5 ms at most), a held request to pull (steal.go), the maker of a stored
// object (owners.go). A request for our own engine waits at its gate (gate.go, hold.go) while the engine could not start
// it; there it is one claim, and whoever takes it out of the queue owns what happens next. On the exchange between agents
// interim heads say held and started, and the answer "moved" names the thief and its ticket (stage.go). The entry agent
// owns the request to its end.
//
// # What the client may have got
//
// An event stream is passed on in whole events (sift.go). Until the first content a broken attempt is replayed once
// behind the head that is already out. Behind content it ends with an error event and without the final chunk, so that
// no client takes a cut answer for a whole one; an abort and its [DONE] never go out.
//
// # Concurrency
//
// A Proxy is safe for concurrent use, and several live in one process. An exchange belongs to the goroutine that
// serves its request, and to the thread for streams while it is parked there (pump.go); its timers only cancel contexts or move
// counters.
//
// # Cost
//
// HTTP/1.1 runs on connections of our own (wire_*.go), a goroutine for each, over the same core as net/http; elsewhere than
// on Linux with plain calls. What dominated a streamed chunk was neither copying nor parsing but the scheduler: a read or
// write that says that it enters the kernel wakes the runtime's monitor thread on a lightly loaded agent. The calls of
// [FastListener]'s connections do not say so, and waiting stays with Go's poller; that took a quarter of a chunk's CPU away.
//
// An established stream leaves its goroutine (pump.go): one thread reads all of them from an epoll set of
// its own, one wait, one read and one write a chunk, and gives a stream back, to a new goroutine, when something is to be waited for
// or decided. TLS is no obstacle: crypto/tls takes an error that says "later" for a passing one. Between two agents over TLS a chunk
// costs 0.81 of what it does with goroutines (200 streams, half of them forwarded, 35.3 to 36.8 against 43.3 to 48.9 µs).
// Most of its chunks differ from the one before in a word and a few digits (shape.go), and go out as they came in: they are neither
// read as JSON nor framed anew, and what a chunk needs of an exchange stands together, since it is cold in the cache each time. At 200
// streams that took the agent's own code from 3.1 to 1.6 µs a chunk, where the kernel takes 15 to 17.
// Go's poller must not know these connections, or each chunk would wake a second thread. Per chunk the thread costs 0.87 of a
// goroutine for each stream (200 long streams with 10,000 chunks/s in all, 13.3 to 14.5 against 15.6 to 16.6 µs, the latter with
// GOMAXPROCS=1; three runs each); before the chunks had a short way it was 0.78, and 0.87 in short streams. The wait that keeps its P
// is what wins: a sketch whose loop went through the scheduler cost 41 µs, and 21 with such a wait. But a P that it keeps is one less
// for all others: with four agents in one process on two CPUs a first token took 270 ms instead of 50. So it is [Config.StreamThread],
// which grapevine agent sets with one P more than there are CPUs. Where Go runs one goroutine at a time (GOMAXPROCS=1), and elsewhere
// than on Linux, streams stay with their goroutines. Requests stay there too: under load Go's poller serves many with one call, and to
// change the thread would cost them more.
//
// Exchanges, heads and answers lie in memory that is used again, a silent stream holds no buffer, and one timer serves an
// exchange after another. A silent stream of the thread costs 9 to 11 KB (1,000 of them at once): no stack, 6.5 KB of connections, heads
// and exchange, and the collector's room. A prompt that a continuation would send again comes on top, and 8 KB of stack for a stream
// with a goroutine. A silent connection costs 6 KB, of which 4 are stack.
// `go run ./test/bench proxy` measures all this beside nginx, HAProxy and Envoy.
package proxy
