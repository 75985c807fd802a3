package agent

import (
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/gpu"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// own is what the agent knows about its own replica, except for the proxy's exact counts. Its loops write, each its part;
// the report, the status page and the probes read.
type own struct {
	changed chan struct{} // one token: something that others must know at once

	mu         sync.Mutex
	facts      facts
	health     engine.Health
	reading    engine.Reading
	foreign    int   // requests at the engine that did not come through this agent, at the last reading
	readError  error // of the last reading
	reads      uint64
	readErrors uint64
	failed     int       // readings in a row that failed
	read       time.Time // of the last reading that did not fail
	upAt       time.Time // when the engine came up last
	gpu        gpu.Reading
	gpuWhy     string // why its memory is unknown; "" when known
	models     []engine.Model
	serves     routing.Service     // kinds of path that the engine answers; 0 = not known
	digest     routing.Opt[uint32] // of models and serves
	warmModel  string              // the model that answered the last warm-up
	readySince time.Time           // also set anew when a suspicion ends: then slow start begins again
	since      time.Time           // of the present state
	restarts   uint64
}

// change applies f under the lock and wakes the report loop if state or flags are others now. It returns both states.
func (o *own) change(f func(o *own)) (before, after routing.State) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before = o.facts.state()
	suspect := o.facts.suspect
	flags, was := o.facts.flags(), o.facts.announced
	f(o)
	after = o.facts.state()
	switch {
	case after != routing.StateReady:
		o.readySince = time.Time{}
	case o.readySince.IsZero():
		o.readySince = time.Now()
	}
	if suspect && !o.facts.suspect && !o.readySince.IsZero() {
		o.readySince = time.Now()
	}
	if before != after || suspect != o.facts.suspect || o.since.IsZero() {
		o.since = time.Now()
	}
	if before != after || flags != o.facts.flags() || was != o.facts.announced {
		select {
		case o.changed <- struct{}{}:
		default:
		}
	}
	return before, after
}

func (o *own) ready() (bool, string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.facts.ready()
}

func (o *own) is() facts {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.facts
}

// report builds the record of this moment. weight is the operator's.
//
// The proxy counts exactly what went through this agent; the engine's page also shows what went around it. At the moment
// of a reading the larger of both counts; between readings the difference stays and the exact count moves:
//
//	foreign = max(0, scraped − own at the reading)      total = own now + foreign
func (o *own) report(load proxy.Load, weight float64, now time.Time) routing.Report {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := routing.Report{
		State: o.facts.state(), Flags: o.facts.flags(),
		Held: routing.Some(load.Held), HeldTokens: routing.Some(load.HeldTokens),
		Accepted: routing.Some(load.Accepted), PrefillRate: load.PrefillRate, DecodeStep: load.DecodeStep,
		RunLimit: o.reading.RunLimit, KVCapacity: o.reading.KVCapacity, KVUsed: o.reading.KVUsed,
		Weight: routing.Some(weight), ModelsDigest: o.digest,
		PendingTokens: routing.Some(max(load.PendingTokens, o.reading.WaitingTokens.Or(0))),
	}
	total := load.Running + load.Waiting + o.foreign
	waiting := min(o.reading.Waiting.Or(0), total)
	if o.reading.RunLimit.OK {
		waiting = max(waiting, total-o.reading.RunLimit.V)
	}
	r.Running = routing.Some(total - waiting)
	if o.reading.Waiting.OK || o.reading.RunLimit.OK {
		r.Waiting = routing.Some(waiting)
	}
	if m := o.gpu.Memory; o.gpuWhy == "" && m.Total > 0 {
		r.GPUMemoryUsed = routing.Some(min(1, float64(m.Used)/float64(m.Total)))
	}
	if !o.readySince.IsZero() {
		r.ReadyFor = routing.Some(now.Sub(o.readySince))
	}
	return r
}

// setReading takes a reading that came at the moment when load was the exact count. wakes: an engine that sleeps is woken
// by its next request, so that it stays in service; only probes leave it alone.
func (o *own) setReading(rd engine.Reading, err error, load proxy.Load, wakes bool) (restarted bool) {
	o.change(func(o *own) {
		o.readError = err
		o.reads++
		if err != nil {
			o.readErrors++
			o.failed++
		} else {
			o.failed = 0
			// A restart that its health page showed too has been dealt with: the warm-up came after it.
			restarted = rd.Resets > o.reading.Resets && o.read.After(o.upAt)
			o.read = time.Now()
			o.foreign = max(0, rd.Running.Or(0)+rd.Waiting.Or(0)-load.Running-load.Waiting)
		}
		if !rd.Running.OK {
			o.foreign = 0
		}
		o.reading = rd
		if rd.Asleep.OK {
			o.facts.dozing = rd.Asleep.V && wakes
			if o.facts.asleep = rd.Asleep.V && !wakes; o.facts.asleep { // it needs a warm-up then, also if its health page was not read meanwhile
				o.facts.warm, o.facts.announced = false, false
			}
		}
		o.facts.stale = o.failed >= 3
	})
	return restarted
}
