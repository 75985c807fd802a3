package proxy

import (
	"context"
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
)

// watch ends an exchange whose engine shows no progress. One timer serves the whole exchange: progress stores a time,
// and the timer, when it fires, looks how old that is; so a chunk costs two atomic stores.
type watch struct {
	cancel context.CancelCauseFunc
	base   time.Time
	last   atomic.Int64 // nanoseconds since base of the last progress
	paused atomic.Bool  // we wait for the client, not for the engine

	mu    sync.Mutex
	limit time.Duration
	cause error
	timer *time.Timer
	done  bool
}

// newWatch begins to wait; limit 0 = for ever.
func newWatch(cancel context.CancelCauseFunc, limit time.Duration, cause error) *watch {
	w := &watch{cancel: cancel, base: time.Now()}
	w.set(limit, cause)
	return w
}

// set changes the limit and counts as progress.
func (w *watch) set(limit time.Duration, cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit, w.cause = limit, cause
	w.progress()
	switch {
	case w.done || limit <= 0:
		if w.timer != nil {
			w.timer.Stop()
		}
	case w.timer == nil:
		w.timer = time.AfterFunc(limit, w.fire)
	default:
		w.timer.Reset(limit)
	}
}

// progress says that the engine has just shown some.
func (w *watch) progress() { w.last.Store(int64(time.Since(w.base))) }

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
	defer w.mu.Unlock()
	if w.done || w.limit <= 0 {
		return
	}
	if w.paused.Load() {
		w.timer.Reset(max(w.limit/16, time.Millisecond)) // look again soon: the write may end at any time
		return
	}
	if idle := time.Since(w.base) - time.Duration(w.last.Load()); idle < w.limit {
		w.timer.Reset(w.limit - idle)
		return
	}
	w.done = true
	w.cancel(w.cause)
}

// stop ends the watch without cancelling.
func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
	if w.timer != nil {
		w.timer.Stop()
	}
}
