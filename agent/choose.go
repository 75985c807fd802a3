package agent

import (
	"math"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// queueLimit is the proxy's form of GRAPEVINE_QUEUE_LIMIT, whose 0 means that nobody waits.
func queueLimit(n int) int {
	if n == 0 {
		return -1
	}
	return n
}

// What was measured longer ago than rateFresh is doubted more and more, twice as much every rateFresh.
const rateFresh = 10 * time.Second

// load is the proxy's count, with a doubt about a speed that nobody has measured for long: a replica that is taken for slow gets
// no requests, and without requests it could never show that it is as fast as the others. So what it was measured at rises,
// up to the fleet's median; the next prompts tell.
func (a *Agent) load(now time.Time) proxy.Load {
	l := a.proxy.Load()
	l.PrefillRate = doubted(l, a.table.Rate(), now)
	return l
}

// doubted is the prefill rate that the replica should be credited with in a fleet of that median.
func doubted(l proxy.Load, fleet float64, now time.Time) routing.Opt[float64] {
	age := now.Sub(l.PrefillAt)
	if r := l.PrefillRate; !r.OK || r.V >= fleet || age <= rateFresh {
		return r
	}
	doubt := math.Exp2(float64(age)/float64(rateFresh) - 1)
	return routing.Some(min(fleet, l.PrefillRate.V*doubt))
}

// report builds the record of this moment, the own digest's sequence included.
func (a *Agent) report(now time.Time) routing.Report {
	r := a.own.report(a.load(now), a.cfg.Weight, now)
	r.Kept = a.kept
	if c := a.proxy.LowestClass(now); c < routing.ClassBatch {
		r.Flags |= routing.FlagSaturated
		r.LowestClass = c
	}
	if a.cfg.Affinity != "off" {
		r.PrefixSeq = a.digests.seq()
	}
	return r
}

// seeEngine tells the gate what the engine's pages say.
func (a *Agent) seeEngine(rd engine.Reading, err error) {
	if err != nil { // the last one holds
		a.ramp.again(a)
		return
	}
	a.digests.see(rd)
	a.own.mu.Lock()
	foreign := a.own.foreign
	a.own.mu.Unlock()
	at := rd.At
	if at.IsZero() {
		at = time.Now()
	}
	a.ramp.see(a, proxy.EngineView{At: at, Running: rd.Running, Waiting: rd.Waiting, RunLimit: rd.RunLimit, KVUsed: rd.KVUsed,
		KVCapacity: rd.KVCapacity, FirstTokens: rd.FirstTokens, Foreign: foreign})
}
