package proxy

import (
	"context"
	"io"
	"slices"
	"sync"
	"time"
)

// life is the context of an exchange, or of one attempt in it. Standard contexts would cost a request a dozen
// allocations and a lock that all requests share; a life serves one after another, and closes the attempt's connection
// itself. Err returns the cause.
//
// Whoever ends a life from another goroutine does so under the lock under which it found it, and which the owner takes to be
// forgotten: so nobody ends the next exchange that has it.
type life struct {
	mu    sync.Mutex
	cause error         // why it is over; nil = it is not
	done  chan struct{} // made when somebody asks
	child *life         // the attempt under way
	conn  io.Closer     // the connection under way, closed at the end
	after []*afterLife
	lent  bool // others may have it beyond its end: it serves no other

	at         *lives // of which it is a member
	prev, next *life
}

// afterLife is a function to be called at the end.
type afterLife struct{ f func() }

// lives are the exchanges under way, so that all can be ended. The zero value is ready.
type lives struct {
	mu    sync.Mutex
	first *life
	over  error // ends newcomers at once
}

// add makes l one of them.
func (s *lives) add(l *life) {
	s.mu.Lock()
	over := s.over
	if over == nil {
		l.at, l.next = s, s.first
		if s.first != nil {
			s.first.prev = l
		}
		s.first = l
	}
	s.mu.Unlock()
	if over != nil {
		l.end(over)
	}
}

func (s *lives) remove(l *life) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.at == nil {
		return
	}
	if l.prev != nil {
		l.prev.next = l.next
	} else {
		s.first = l.next
	}
	if l.next != nil {
		l.next.prev = l.prev
	}
	l.at, l.prev, l.next = nil, nil, nil
}

// end ends all, and those that come later.
func (s *lives) end(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = cause
	for l := s.first; l != nil; l = l.next {
		l.end(cause)
	}
}

// attempt begins a life inside another context, which ends with it; stop undoes that.
func newAttempt(ctx context.Context, l *life) (stop func() bool) {
	p, ok := ctx.(*life)
	if !ok {
		l.lent = true // the call may come late
		return context.AfterFunc(ctx, func() { l.end(context.Cause(ctx)) })
	}
	p.mu.Lock()
	p.child = l
	over := p.cause
	p.mu.Unlock()
	if over != nil {
		l.end(over)
	}
	return nil
}

// orphan makes the end of the context an attempt's no more, and reports whether nobody else has the attempt's life.
func orphan(ctx context.Context, l *life) (alone bool) {
	if p, ok := ctx.(*life); ok {
		p.mu.Lock()
		p.child = nil
		p.mu.Unlock()
	}
	return l.alone()
}

// renewed returns l as new, or nil if not its owner alone has it.
func (l *life) renewed() *life {
	if !l.alone() {
		return nil
	}
	*l = life{}
	return l
}

// alone reports whether its owner alone has l, if those forgot it that could end it.
func (l *life) alone() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.lent
}

// end ends l for the cause, once.
func (l *life) end(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return
	}
	l.cause = cause
	if l.done != nil {
		close(l.done)
	}
	if l.child != nil {
		l.child.end(cause)
	}
	if conn := l.conn; conn != nil { // ends the read or write under way; a close may have to wait
		go func() { _ = conn.Close() }()
	}
	for _, a := range l.after {
		go a.f()
	}
	l.child, l.conn, l.after = nil, nil, nil
}

// hold makes the end of l close c. False means that it is over already, and c is closed.
func (l *life) hold(c io.Closer) bool {
	l.mu.Lock()
	over := l.cause != nil
	if !over {
		l.conn = c
	}
	l.mu.Unlock()
	if over {
		_ = c.Close()
	}
	return !over
}

// release undoes hold. False means that the connection was closed.
func (l *life) release() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = nil
	return l.cause == nil
}

// Deadline implements context.Context.
func (l *life) Deadline() (time.Time, bool) { return time.Time{}, false }

// Value implements context.Context.
func (l *life) Value(any) any { return nil }

// Err implements context.Context: the cause of the end.
func (l *life) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// Done implements context.Context.
func (l *life) Done() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done == nil {
		l.done, l.lent = make(chan struct{}), true
		if l.cause != nil {
			close(l.done)
		}
	}
	return l.done
}

// AfterFunc is what package context asks a foreign context for, so that its children cost no goroutine.
func (l *life) AfterFunc(f func()) (stop func() bool) {
	a := &afterLife{f}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lent = true
	if l.cause != nil {
		go f()
		return func() bool { return false }
	}
	l.after = append(l.after, a)
	return func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for i, x := range l.after {
			if x == a {
				if l.after = slices.Delete(l.after, i, i+1); len(l.after) == 0 {
					l.after = nil // what a dial needed would stay for as long as its stream
				}
				return true
			}
		}
		return false
	}
}

// closeAtEnd closes c when ctx ends.
func closeAtEnd(ctx context.Context, c io.Closer) holder {
	if l, ok := ctx.(*life); ok {
		l.hold(c)
		return holder{life: l}
	}
	return holder{stop: context.AfterFunc(ctx, func() { _ = c.Close() })}
}

// holder is a connection's tie to a context.
type holder struct {
	life *life
	stop func() bool
}

// release undoes the tie and reports whether the connection is still open.
func (h holder) release() bool {
	if h.life != nil {
		return h.life.release()
	}
	return h.stop()
}
