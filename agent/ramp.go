package agent

import (
	"math"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// ramp caps how many requests the own engine gets at once while the replica starts slowly: its limit times the share that
// choosers give it (routing.SlowStart). Choosers may err together; the replica itself does not. The reading loop owns it.
type ramp struct {
	view   proxy.EngineView
	capped bool // what the gate knows is less than the view says
}

// rampLimit is taken for the limit of an engine that tells none: enough for a small engine, and passed within seconds.
const rampLimit = 64

// see tells the gate a new view.
func (r *ramp) see(a *Agent, v proxy.EngineView) {
	r.view = v
	share := a.table.SlowStartShare(time.Now())
	r.capped = share < 1
	v.RunLimit = rampedLimit(v.RunLimit, share, v.Running.Or(0))
	a.proxy.SetEngine(v)
}

// again renews a cap where no new view could be had, so that it ends.
func (r *ramp) again(a *Agent) {
	if r.capped {
		r.see(a, r.view)
	}
}

// rampedLimit is what the engine may run at that share of its load. What it runs already it may go on running: slow start may
// begin in the middle, when more than half of the fleet has ended its own.
func rampedLimit(limit routing.Opt[int], share float64, running int) routing.Opt[int] {
	if share >= 1 {
		return limit
	}
	return routing.Some(max(1, running, int(math.Ceil(float64(limit.Or(rampLimit))*share))))
}
