package agent

import (
	"context"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

const (
	// reportEvery is how often the record is built anew; gossip decides which ones go out.
	reportEvery = 50 * time.Millisecond
	// announceFor bounds the time between the warm-up and readiness.
	announceFor   = 2 * time.Second
	announceTimes = 3
)

// reportLoop keeps the own record fresh: in the table, for picks made here, and at gossip, for everybody else's.
func (a *Agent) reportLoop(ctx context.Context) error {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		a.publish()
		a.beat.Store(time.Now().UnixNano())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-a.own.changed:
		}
	}
}

// publish builds the record of this moment and hands it on.
func (a *Agent) publish() routing.Report {
	a.publishing.Lock()
	defer a.publishing.Unlock()
	now := time.Now()
	if suspect := a.proxy.Suspect(now); suspect != a.own.is().suspect {
		a.own.change(func(o *own) { o.facts.suspect = suspect })
		if suspect {
			a.warn("suspect", MsgSuspect)
			a.log.Warn(MsgSuspect)
		} else {
			a.clear("suspect")
		}
	}
	r := a.report(now)
	a.node.Offer(r)
	a.node.Stamp(&r)
	a.table.Update(r, now)
	return r
}

// announce tells the others three times that the replica is ready, and then says so to the kubelet. Nobody there: at
// once. Whatever gossip does, it takes at most two seconds.
func (a *Agent) announce(ctx context.Context) {
	wait := time.NewTimer(announceFor)
	defer wait.Stop()
	select {
	case <-a.node.PublishNow(a.publish(), announceTimes):
	case <-wait.C:
	case <-ctx.Done():
		return
	}
	ready := false
	a.stateChange(func(o *own) {
		o.facts.announced = o.facts.warm
		ready, _ = o.facts.ready()
	})
	if ready {
		a.log.Info(MsgReady, KeyMembers, a.node.Alive(), KeyTook, time.Since(a.started).Round(time.Millisecond))
	}
}
