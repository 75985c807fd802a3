// Package link carries small questions between agents: many at once over one
// connection to each peer, answered from memory in some tens of microseconds.
//
// Agents ask each other for an exact score before they send a request, for a
// held request to pull, for the owner of a stored object, for a record that
// UDP did not bring, for a whole prefix digest. All are one frame there and
// one frame back:
//
//	length  uint32  little endian, of what follows (9 to MaxFrame)
//	kind    uint8   what is asked; an answer has the same kind with the top bit set
//	id      uint64  of the question, chosen by the asker, unique on the connection
//	payload         kind's own layout
//
// The connection begins as an HTTP/1.1 request on the peer port that asks for
// an upgrade to [Protocol] (the peer listener's TLS and membership rules have
// been passed by then), so that no further port is needed. Either end may close
// it at any time; questions under way then fail and the next one dials again.
//
// # Concurrency
//
// A [Client] may be used by many goroutines. It dials when first asked, at most
// once at a time, and closes the connection after [Client.Idle] without a
// question. [Serve] answers one after another on the goroutine that calls it:
// handlers must not block.
package link
