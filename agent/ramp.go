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
	v.RunLimit = rampedLimit(v.RunLimit, share)
	a.proxy.SetEngine(v)
}

// again renews a cap where no new view could be had, so that it ends.
func (r *ramp) again(a *Agent) {
	if r.capped {
		r.see(a, r.view)
	}
}

func rampedLimit(limit routing.Opt[int], share float64) routing.Opt[int] {
	if share >= 1 {
		return limit
	}
	return routing.Some(max(1, int(math.Ceil(float64(limit.Or(rampLimit))*share))))
}
