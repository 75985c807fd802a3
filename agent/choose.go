package agent

import (
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

// load is the proxy's count, with a doubt about a speed that nobody has measured for long.
func (a *Agent) load(now time.Time) proxy.Load {
	l := a.proxy.Load()
	l.PrefillRate = routing.Doubted(l.PrefillRate, now.Sub(l.PrefillAt), a.table.Rate())
	return l
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
