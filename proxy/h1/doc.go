// Package h1 reads HTTP/1.1 messages in place, by the letter of RFC 9112.
//
// It is the wire half of the agent's own HTTP/1.1 path. Heads are parsed where
// they lie in the read buffer: a [Request] or [Response] holds slices of that
// buffer and a reused list of fields, no maps and no copies, so that parsing
// allocates nothing once the list has grown. Chunked framing is walked
// ([Chunks]), not decoded and encoded again: the bytes that came in can go on
// as they are while the walker tells where the message ends and which bytes
// are payload.
//
// # Strictness
//
// A forwarder must never pass on bytes that the next hop could read in another
// way. Whatever RFC 9112 lets a recipient either repair or refuse is refused
// here: bare LF, folded lines, space before a colon, Content-Length beside
// Transfer-Encoding, repeated Content-Length, a transfer coding other than one
// single "chunked", chunk sizes that are not plain hex digits, a missing or
// repeated Host. The answer is 400 (or 431, 501, 505 where those fit) and a
// closed connection; [Error] carries the status.
//
// Targets in absolute form and CONNECT are refused: an agent is the origin
// server for its clients, never their forward proxy.
//
// # Concurrency
//
// Values are for one connection and one goroutine at a time. Slices handed out
// are valid until the buffer they point into is reused.
package h1
