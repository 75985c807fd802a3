package proxy

import (
	"net/http/httptrace"
	"sync"
)

// traceBox collects how far a try got. The transport may call from its own goroutines, and may go on after it has
// returned an error, hence the lock. A new connection resets it: only the last one counts.
type traceBox struct {
	mu sync.Mutex
	t  trace
}

func (b *traceBox) client() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) {
			b.mu.Lock()
			b.t = trace{got: true, reused: i.Reused}
			b.mu.Unlock()
		},
		GotFirstResponseByte: func() {
			b.mu.Lock()
			b.t.replied = true
			b.mu.Unlock()
		},
	}
}

func (b *traceBox) get() trace {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.t
}
