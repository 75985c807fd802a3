package proxy

import (
	"context"
	"io"
	"time"
)

const methodHead = "HEAD" // its answers have no body

// Field is one header field. Names are compared without regard to case.
type Field struct{ Name, Value string }

// Header is a list of fields in the order in which they stand in the message. Host, Content-Length and
// Transfer-Encoding are not in it: the adapters keep them in fields of their own.
type Header []Field

// Get returns the first value of that name, or "".
func (h Header) Get(name string) string {
	for i := range h {
		if equalFold(h[i].Name, name) {
			return h[i].Value
		}
	}
	return ""
}

// Has reports whether there is a field of that name.
func (h Header) Has(name string) bool {
	for i := range h {
		if equalFold(h[i].Name, name) {
			return true
		}
	}
	return false
}

// Count returns how many fields of that name there are.
func (h Header) Count(name string) (n int) {
	for i := range h {
		if equalFold(h[i].Name, name) {
			n++
		}
	}
	return n
}

// Add appends a field.
func (h *Header) Add(name, value string) { *h = append(*h, Field{name, value}) }

// Set replaces all fields of that name by one.
func (h *Header) Set(name, value string) {
	h.Del(name)
	h.Add(name, value)
}

// Del removes all fields of that name.
func (h *Header) Del(name string) {
	h.DelFunc(func(n string) bool { return equalFold(n, name) })
}

// DelFunc removes the fields for whose name f is true, in place.
func (h *Header) DelFunc(f func(name string) bool) {
	out := (*h)[:0]
	for _, fd := range *h {
		if !f(fd.Name) {
			out = append(out, fd)
		}
	}
	clear((*h)[len(out):])
	*h = out
}

// RequestHead is a request as it came in, apart from its body.
type RequestHead struct {
	Method  string
	Target  string // path and query as they stand in the request line, never decoded
	Host    string
	Scheme  string // http or https
	Remote  string // address of the client's connection, host:port
	Header  Header
	Length  int64  // bytes of the body; 0 none, -1 not told
	Upgrade string // protocol asked for by an upgrade, lower case; "" = none
	HTTP2   bool
	Peer    uint64 // boot id that the connection's certificate proves; 0 = none does
}

// ResponseHead is an answer, apart from its body.
type ResponseHead struct {
	Now     time.Time // the clock, if it was just looked at; zero = it was not
	Status  int
	Header  Header
	Length  int64    // bytes of the body; -1 not told
	Trailer []string // names of trailers announced
}

// Downstream is the answering side of one exchange: the client's connection, or that of the entry agent. Its methods
// are called by one goroutine at a time.
type Downstream interface {
	// Head gives status and fields. With flush they are on the wire when it returns, otherwise they go with the first
	// Write. It is called at most once.
	Head(h *ResponseHead, flush bool) error
	// Write sends a piece of the body. It is on the wire when Write returns; p is not kept.
	Write(p []byte) error
	// Finish ends the answer as a whole one.
	Finish(trailer Header) error
	// Abort ends the answer so that nobody takes it for a whole one: no final chunk, or a reset stream.
	Abort()
	// Tunnel sends the head of a 101 answer and hands over the connection, early bytes included.
	Tunnel(h *ResponseHead) (io.ReadWriteCloser, error)
}

// Outgoing is a request as it is sent on.
type Outgoing struct {
	Method, Target, Host string
	Header               Header
	Body                 io.ReadCloser        // nil = none; the upstream closes it when it will not read any more
	Reopen               func() io.ReadCloser // another reader of Body from its start; nil = it can be read once
	Length               int64                // bytes of Body; -1 not known
	HTTP2                bool                 // send it by HTTP/2 (gRPC)
	Upgrade              string               // ask for this protocol; "" = none
	Now                  time.Time            // the clock; zero = it must be looked at
	Interim              func(Header)         // gets interim answers (1xx) but 100 and 101; nil = they are left
}

// rest makes o empty and keeps its memory.
func (o *Outgoing) rest() {
	clear(o.Header)
	*o = Outgoing{Header: o.Header[:0]}
}

// Upstream sends requests to one place: our engine, or one peer's agent. It is safe for concurrent use.
type Upstream interface {
	// Send returns when the answer's head is there. The end of ctx ends the exchange at once, its body included.
	// Errors are of type *SendError.
	Send(ctx context.Context, r *Outgoing) (*Answer, error)
}

// Answer is what came back.
type Answer struct {
	Head    ResponseHead
	Body    io.ReadCloser
	Trailer func() Header      // valid after Body's end
	Recycle func()             // gives the answer's memory, strings of the head included, back; nil = nothing to give
	Tunnel  io.ReadWriteCloser // set instead of Body after 101
}

// Stage is how far a request got before it failed.
type Stage uint8

// The stages, in the order of a request's life.
const (
	StageDial    Stage = iota // no connection: it surely did not run
	StageNoReply              // sent, and the connection ended before any byte of an answer
	StageHead                 // the answer began and its head was cut or malformed
)

// SendError says how a request failed before its answer's head was there.
type SendError struct {
	Stage  Stage
	Reused bool // the connection had served a request before
	Err    error
}

func (e *SendError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SendError) Unwrap() error { return e.Err }
