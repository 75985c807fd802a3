package agent

import (
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/proxy"
)

// queueLimit is the proxy's form of GRAPEVINE_QUEUE_LIMIT, whose 0 means that nobody waits.
func queueLimit(n int) int {
	if n == 0 {
		return -1
	}
	return n
}

// seeEngine tells the gate what the engine's pages say.
func (a *Agent) seeEngine(rd engine.Reading, err error) {
	if err != nil {
		return // the last one holds
	}
	a.own.mu.Lock()
	foreign := a.own.foreign
	a.own.mu.Unlock()
	at := rd.At
	if at.IsZero() {
		at = time.Now()
	}
	a.proxy.SetEngine(proxy.EngineView{At: at, Waiting: rd.Waiting, RunLimit: rd.RunLimit, KVUsed: rd.KVUsed,
		KVCapacity: rd.KVCapacity, FirstTokens: rd.FirstTokens, Foreign: foreign})
}
