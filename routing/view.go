package routing

import "time"

// staleAfter is how many heartbeats may pass without a record before a replica is drawn only if nothing else is left.
const staleAfter = 3

// defaultHeartbeat is assumed where a record promises none.
const defaultHeartbeat = time.Second

// view is the newest record of a peer, prepared for picking. It is replaced, never changed.
type view struct {
	base     load
	level    level // what the record alone says
	lowest   uint8 // lowest class it admits; 0 = all
	pending  bool  // the record says how many prompt tokens are pending
	at       tick  // receipt, by our clock
	sampled  tick  // when the numbers were true: receipt − age
	stale    tick  // from when on it is stale
	readyAt  tick  // since when it is ready; never = unknown
	report   Report
	received time.Time
}

// newView prepares a record for picking.
func newView(r Report, now time.Time, at tick) *view {
	hb := r.Heartbeat
	if hb <= 0 {
		hb = defaultHeartbeat
	}
	sampled := at - tick(r.Age)
	v := &view{report: r, received: now, at: at, sampled: sampled, stale: sampled + staleAfter*tick(hb), level: r.level()}
	if r.ReadyFor.OK {
		v.readyAt = sampled - tick(r.ReadyFor.V)
	}
	if r.LowestClass != 0 {
		v.lowest = r.LowestClass
	}
	b := &v.base
	b.running = float64(r.Running.Or(0))
	b.waiting = float64(r.Waiting.Or(0) + r.Held.Or(0))
	v.pending = r.PendingTokens.OK
	b.queue = float64(r.PendingTokens.Or(0) + r.HeldTokens.Or(0))
	if !r.PendingTokens.OK {
		b.queue += float64(r.Waiting.Or(0) * defaultPrompt)
	}
	if !r.HeldTokens.OK {
		b.queue += float64(r.Held.Or(0) * defaultPrompt)
	}
	b.rate = max(0, r.PrefillRate.Or(0))
	b.kv = r.KVUsed.Or(0)
	b.kvCap = float64(r.KVCapacity.Or(0))
	b.limit = float64(r.RunLimit.Or(0))
	b.step = r.DecodeStep.Or(0).Seconds()
	return v
}
