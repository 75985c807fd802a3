package proxy

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Why an exchange was ended from our side. They are causes of the upstream's context.
var (
	errCauseFirst = errors.New("no content within the first-byte timeout")
	errCauseIdle  = errors.New("no data within the idle timeout")
	errCauseDrain = errors.New("ended by the drain timeout")
	errCauseDone  = errors.New("exchange is over")
	// errCauseEngine ends what is at our own engine because its agent declared it dead or hung.
	errCauseEngine = errors.New("the engine was declared dead")
)

// watch ends an exchange whose engine shows no progress. Progress stores a time, and the timer, when it fires, looks
// how old that is; so a chunk costs two atomic stores. A watch serves one exchange after another, and its timer stays
// armed meanwhile: it fires at the earliest moment that any of them asked for and looks what is asked for now, so
// that most exchanges touch no timer at all.
type watch struct {
	base   time.Time
	last   atomic.Int64 // nanoseconds since base of the last progress
	paused atomic.Bool  // we wait for the client, not for the engine

	mu     sync.Mutex
	cancel endable // nil = at rest
	limit  time.Duration
	cause  error
	soon   time.Duration // since base, when the prefill of a should be over; 0 = nothing is predicted
	a      *attempt
	timer  *time.Timer
	armed  time.Duration // since base, when the timer fires; 0 = it does not
}

// endable is what a watch ends.
type endable interface{ end(cause error) }

// start makes a watch at rest wait; limit 0 = for ever.
func (w *watch) start(what endable, limit time.Duration, cause error, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancel = what
	w.paused.Store(false)
	w.setLocked(limit, cause, now)
}

// set changes the limit and counts as progress.
func (w *watch) set(limit time.Duration, cause error, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.setLocked(limit, cause, at)
}

func (w *watch) setLocked(limit time.Duration, cause error, at time.Time) {
	now := at.Sub(w.base)
	w.limit, w.cause = limit, cause
	w.last.Store(int64(now))
	if w.cancel != nil && limit > 0 {
		w.arm(now+limit, now)
	}
}

// leastGuess is how long a prefill is taken to last at least. The short prompts of a busy agent would cost a timer each, and the
// goroutine that it starts; so a watch has a hundred a second at most.
const leastGuess = 10 * time.Millisecond

// predict calls a.predicted after d, leastGuess at least, unless the watch is at rest by then.
func (w *watch) predict(a *attempt, d time.Duration, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := at.Sub(w.base)
	w.a, w.soon = a, now+max(d, leastGuess)
	if w.armed == 0 || w.armed > w.soon+d/4 { // a guess need not be met to the millisecond
		w.arm(w.soon, now)
	}
}

// arm makes the timer fire at t at the latest.
func (w *watch) arm(t, now time.Duration) {
	if w.armed > 0 && w.armed <= t {
		return
	}
	w.armed = t
	if w.timer == nil {
		w.timer = time.AfterFunc(t-now, w.fire)
		return
	}
	w.timer.Reset(t - now)
}

// progress says that the engine has just shown some.
func (w *watch) progress() { w.last.Store(int64(time.Since(w.base))) }

// progressAt is progress for those who have read the clock.
func (w *watch) progressAt(now time.Time) { w.last.Store(int64(now.Sub(w.base))) }

// silence is for how long the engine has shown no progress; 0 while we wait for the client.
func (w *watch) silence() time.Duration {
	if w.paused.Load() {
		return 0
	}
	return time.Since(w.base) - time.Duration(w.last.Load())
}

// pause and resume frame a write to the client: a slow client is not a silent engine. The time that the write took
// does not count as silence; what was written counts as progress only if it was (a comment is none).
func (w *watch) pause() (at int64) {
	w.paused.Store(true)
	return int64(time.Since(w.base))
}

func (w *watch) resume(at int64, progress bool) {
	now := int64(time.Since(w.base))
	if progress {
		w.last.Store(now)
	} else {
		w.last.Add(now - at)
	}
	w.paused.Store(false)
}

func (w *watch) fire() {
	w.mu.Lock()
	defer w.mu.Unlock() // so that neither is the next exchange's
	cancel, cause, a := w.due()
	if a != nil {
		a.predicted(time.Now())
	}
	if cancel != nil {
		cancel.end(cause)
	}
}

// due looks what is asked for now, and arms the timer for what is to come; the lock is held.
func (w *watch) due() (cancel endable, cause error, a *attempt) {
	now := time.Since(w.base)
	w.armed = 0
	if w.cancel == nil {
		return nil, nil, nil
	}
	if w.soon > 0 {
		if now >= w.soon {
			a, w.a, w.soon = w.a, nil, 0
		} else {
			w.arm(w.soon, now)
		}
	}
	if w.limit <= 0 {
		return nil, nil, a
	}
	if w.paused.Load() {
		w.arm(now+max(w.limit/16, time.Millisecond), now) // look again soon: the write may end at any time
		return nil, nil, a
	}
	if end := time.Duration(w.last.Load()) + w.limit; now < end {
		w.arm(end, now)
		return nil, nil, a
	}
	cancel, w.cancel = w.cancel, nil
	return cancel, w.cause, a
}

// stop ends the wait without cancelling.
func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancel, w.a, w.soon = nil, nil, 0
}
