// Package span has the spans of one request and the W3C trace context that carries them from agent to agent. It knows no
// exporter and no request: package proxy fills a Trace, package agent/otlp sends it.
//
// A Trace belongs to one goroutine until it is given away; after that nobody writes to it.
package span

import (
	"strings"
	"time"
)

// Kind is a span's place in a call, with OpenTelemetry's numbers.
type Kind uint8

// The kinds that are used.
const (
	Internal Kind = 1 // work inside of the agent
	Server   Kind = 2 // a request that came in
	Client   Kind = 3 // a request that was sent
)

// Trace is what one agent has to tell about one request: spans of one trace.
type Trace struct {
	ID    TraceID
	State string // tracestate as it came in, "" = none
	Spans []Span
}

// Span is one piece of work.
type Span struct {
	ID, Parent ID // a zero parent makes it the root
	Name       string
	Kind       Kind
	Start, End time.Time
	Attrs      []Attr
	Events     []Event
	Error      string // why it failed, in a word or two; "" = it did not
}

// Event is a moment within a span.
type Event struct {
	Name  string
	At    time.Time
	Attrs []Attr
}

// Attr is an attribute. Value is a string, bool, int64, float64 or []string.
type Attr struct {
	Key   string
	Value any
}

// maxText bounds a text attribute, in bytes: a client chooses the model's name.
const maxText = 256

// Text makes an attribute of a text, which is cut where it is too long. It is copied: much of what is told of a request lies in
// buffers of its connection, which are used again before the trace is sent.
func Text(key, value string) Attr {
	return Attr{key, strings.Clone(value[:min(len(value), maxText)])}
}

// Int makes an attribute of a whole number.
func Int(key string, value int) Attr { return Attr{key, int64(value)} }

// Float makes an attribute of a number.
func Float(key string, value float64) Attr { return Attr{key, value} }

// Bool makes an attribute of a truth value.
func Bool(key string, value bool) Attr { return Attr{key, value} }
