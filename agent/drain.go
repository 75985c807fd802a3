package agent

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	// spread is how long a drain lasts at least where others are: until they know, and what they sent has arrived.
	spread = 500 * time.Millisecond
	// relayFor is how much longer than the drain timeout requests may live that entered here and run elsewhere.
	relayFor = 5 * time.Second
	// drainBegins is how long GET /drained waits for a drain to begin.
	drainBegins = 2 * time.Second
	drainCheck  = 50 * time.Millisecond
	// listenOn is how long a draining agent takes new clients for as long as they come: time for balancers to notice. One
	// that goes by refused connections alone (nginx) never would, and its requests would be cut off at the end.
	listenOn = 10 * time.Second
	// emptied is how long after the drain timeout the engine may still show requests that were taken away from it.
	emptied = 500 * time.Millisecond
)

// drain is the end of an agent's life. It begins once, by the end of Run's context or by POST /drain; the agent goes on
// answering either way.
type drain struct {
	once  sync.Once
	begun chan struct{} // closed when it begins
	ended chan struct{} // closed when Run returns
	at    time.Time     // set before begun is closed
	empty *time.Timer   // takes what is left away from the engine when the drain timeout is over; set before begun is closed
}

// Drain makes the agent take nothing new and finish what it has; it returns at once, and reports whether it was the first
// to ask. The agent stays, answering for others, until Run's context ends.
func (a *Agent) Drain() (first bool) {
	select {
	case <-a.listening:
	default:
		return false // nothing to drain yet
	}
	a.drain.once.Do(func() {
		first = true
		a.drain.at = time.Now()
		a.stateChange(func(o *own) { o.facts.draining = true })
		a.proxy.SetDraining(true)
		a.node.PublishNow(a.publish(), announceTimes)
		a.log.Info(MsgDraining, KeyInflight, a.proxy.Inflight(), "timeout", a.cfg.DrainTimeout)
		a.drain.empty = time.AfterFunc(a.cfg.DrainTimeout, a.emptyEngine)
		close(a.drain.begun)
	})
	return first
}

// shutdown drains, and returns when nothing is under way or the time is over.
func (a *Agent) shutdown(ctx, work context.Context, s *servers) {
	a.Drain()
	var shortest time.Duration
	if a.node.Alive() > 1 {
		shortest = spread
	}
	if !sleepUntil(work, a.drain.at.Add(min(shortest, a.cfg.DrainTimeout))) {
		return
	}
	end := a.drain.at.Add(a.cfg.DrainTimeout)
	idle := a.waitIdle(work, a.drain.at.Add(min(listenOn, a.cfg.DrainTimeout)))
	if !idle && work.Err() == nil {
		s.refuse(end.Add(relayFor))
		idle = a.waitIdle(work, end)
	}
	if !idle && work.Err() == nil {
		a.emptyEngine()
		if !a.waitIdle(work, time.Now().Add(relayFor)) && work.Err() == nil {
			a.proxy.Cut()
			a.waitIdle(work, time.Now().Add(time.Second))
		}
	}
	a.drain.empty.Stop()
	a.log.Info(MsgDrained, KeyTook, time.Since(a.drain.at).Round(time.Millisecond), KeyInflight, a.proxy.Inflight())
}

// emptyEngine takes what is left away from the own engine: other agents have theirs replayed or continued elsewhere, what
// entered here goes on at a peer.
func (a *Agent) emptyEngine() {
	l := a.proxy.Load()
	if n := l.Running + l.Waiting; n > 0 {
		a.log.Warn(MsgDrainCut, KeyInflight, n)
		a.warn("drain", MsgDrainCut)
	}
	a.proxy.Empty()
}

// lastMoment is when the listeners must be closed whatever is under way: the end of the drain timeout, but a second at
// least for an answer that is nearly out.
func (a *Agent) lastMoment() time.Time {
	last := time.Now().Add(time.Second)
	select {
	case <-a.drain.begun:
		if end := a.drain.at.Add(a.cfg.DrainTimeout); end.After(last) {
			return end
		}
	default: // something broke
	}
	return last
}

// waitIdle returns true as soon as no request is under way here, false at the deadline.
func (a *Agent) waitIdle(ctx context.Context, deadline time.Time) bool {
	c, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	return a.proxy.Wait(c) == nil
}

// drained blocks as GET /drained promises: up to two seconds for a drain to begin, then until no request is at the own
// engine, the engine is dead, or the drain timeout is over. It is for the engine's preStop hook.
func (a *Agent) drained(ctx context.Context) string {
	wait := time.NewTimer(drainBegins)
	defer wait.Stop()
	select {
	case <-a.drain.begun:
	case <-wait.C:
		return "not draining"
	case <-ctx.Done():
		return ""
	}
	deadline := a.drain.at.Add(a.cfg.DrainTimeout)
	tick := time.NewTicker(drainCheck)
	defer tick.Stop()
	for {
		l := a.proxy.Load()
		n := l.Running + l.Waiting
		switch {
		case n == 0:
			return "drained"
		case !a.own.is().engineUp:
			return "the engine is dead"
		case !time.Now().Before(deadline.Add(emptied)):
			return fmt.Sprintf("drain timeout is over, %d requests are still at the engine", n)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ""
		case <-a.drain.ended:
			return "drained"
		}
	}
}

func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
