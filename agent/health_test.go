package agent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// fleetOf starts n agents with simulated engines that know each other.
func fleetOf(t *testing.T, n int, engine enginesim.ServerConfig, tune func(*Config)) (agents []*runner, sims []*simEngine) {
	t.Helper()
	var join []string
	for i := range n {
		sims = append(sims, startSim(t, engine))
		cfg := loopbackConfig(sims[i].url())
		cfg.NodeName, cfg.Join = fmt.Sprintf("a%d", i), join
		if tune != nil {
			tune(&cfg)
		}
		agents = append(agents, start(t, cfg, Options{Seed: uint64(i + 1)}))
		join = append(join, agents[i].Addresses().Gossip)
	}
	for _, a := range agents {
		a.untilReady()
		a.eventually(10*time.Second, "knowing all as ready", func() bool {
			ready := 0
			for _, p := range a.Status().Peers {
				if p.State == "ready" && len(p.Models) > 0 {
					ready++
				}
			}
			return ready == n
		})
	}
	return agents, sims
}

// inTurn has requests go everywhere, where the default would keep them at an idle entry.
func inTurn(c *Config) { c.Policy = "round_robin" }

// of is how one agent sees another.
func (r *runner) of(other *runner) PeerStatus {
	for _, p := range r.Status().Peers {
		if p.Node == other.Node() {
			return p
		}
	}
	return PeerStatus{}
}

func (r *runner) ask(n int) (failed []string) {
	for i := range n {
		if code, body := r.chat(strings.Replace(chatBody, "hello there", fmt.Sprintf("hello %d", i), 1)); code != 200 {
			failed = append(failed, fmt.Sprint(code, " ", body))
		}
	}
	return failed
}

// An engine that fails each request: its own agent publishes the suspicion after three in a row, whoever sent them; all see
// it, with since when and why; hardly anything is sent there; and when it ends, the replica starts slowly.
func TestSuspectIsPublished(t *testing.T) {
	t.Parallel()
	agents, sims := fleetOf(t, 3, fast(), inTurn)
	for _, a := range agents { // they have started long ago
		a.own.change(func(o *own) { o.readySince = time.Now().Add(-time.Minute) })
	}
	bad := agents[1]
	require.NoError(t, sims[1].server.Inject(enginesim.Fault{Kind: "error500"}))
	before := bad.proxy.Load().Accepted
	for i := range 3 { // one from each entry: nobody but the replica's own agent can count to three
		for tries := 0; bad.proxy.Load().Accepted < before+uint32(i)+1 && tries < 200; tries++ {
			agents[i].chat(chatBody)
		}
	}
	bad.eventually(2*time.Second, "suspicion", func() bool {
		s := bad.Status()
		return s.State == "suspect" && s.Why == MsgSuspect && s.SinceMS < 2000
	})
	for _, a := range []*runner{agents[0], agents[2]} {
		a.eventually(2*time.Second, "news of it", func() bool {
			p := a.of(bad)
			return (p.State == "suspect" || p.State == "ejected") && p.Why != "" && p.SinceMS < 5000
		})
	}
	at := bad.proxy.Load().Accepted
	failed := append(agents[0].ask(40), agents[2].ask(40)...)
	assert.LessOrEqual(t, bad.proxy.Load().Accepted-at, uint32(1), "a suspect gets nothing while others live")
	assert.LessOrEqual(t, len(failed), 1)

	sims[1].server.Clear("")
	bad.eventually(15*time.Second, "end of the suspicion", func() bool { return bad.Status().State == "ready" })
	assert.Less(t, bad.table.SlowStartShare(time.Now()), 0.3, "slow start after it")
	for _, a := range []*runner{agents[0], agents[2]} {
		a.eventually(20*time.Second, "readmission", func() bool { return a.of(bad).State == "ready" })
	}
	assert.Empty(t, agents[0].ask(30))
}

// Connections that break: what an entry sees itself ejects the replica there for a time, and a good trial readmits it.
func TestEjectionEndsByTheClock(t *testing.T) {
	t.Parallel()
	agents, sims := fleetOf(t, 3, fast(), inTurn)
	bad := agents[2]
	require.NoError(t, sims[2].server.Inject(enginesim.Fault{Kind: "reset"}))
	for tries := 0; agents[0].of(bad).State != "ejected" && tries < 300; tries++ {
		code, body := agents[0].chat(chatBody)
		require.Equal(t, 200, code, body)
	}
	p := agents[0].of(bad)
	require.Equal(t, "ejected", p.State)
	assert.Equal(t, "failed requests that we sent", p.Why)
	assert.InDelta(t, 5000, p.EjectedUntilMS.Or(0), 1500)
	sims[2].server.Clear("")
	agents[0].eventually(30*time.Second, "readmission", func() bool {
		agents[0].ask(3)
		return agents[0].of(bad).State == "ready"
	})
}

// Most replicas fail at once: those that are merely aside come back, the known dead do not.
func TestPanicLeavesTheDead(t *testing.T) {
	t.Parallel()
	agents, sims := fleetOf(t, 4, fast(), inTurn)
	sims[2].stop() // known dead in three checks
	sims[3].stop()
	for _, i := range []int{2, 3} {
		agents[0].eventually(10*time.Second, "news of the dead", func() bool { return agents[0].of(agents[i]).State != "ready" })
	}
	require.NoError(t, sims[1].server.Inject(enginesim.Fault{Kind: "error500", Count: 3}))
	for range 60 {
		agents[0].chat(chatBody)
	}
	dead := agents[2].proxy.Load().Accepted + agents[3].proxy.Load().Accepted
	assert.Empty(t, agents[0].ask(40))
	assert.Equal(t, dead, agents[2].proxy.Load().Accepted+agents[3].proxy.Load().Accepted, "corpses get nothing while others live")
}

// A replica that starts beside others takes little at first: at the choosers, and by its own cap.
func TestSlowStart(t *testing.T) {
	t.Parallel()
	slow := fast()
	slow.Params = enginesim.Rates(100_000, 20*time.Millisecond, 40)
	agents, _ := fleetOf(t, 3, slow, nil)
	for _, a := range agents { // the three have started long ago
		a.own.change(func(o *own) { o.readySince = time.Now().Add(-time.Minute) })
	}
	time.Sleep(time.Second)
	cfg := loopbackConfig(startSim(t, slow).url())
	cfg.NodeName, cfg.Join = "late", []string{agents[0].Addresses().Gossip}
	late := start(t, cfg, Options{Seed: 9})
	late.untilReady()
	late.eventually(5*time.Second, "its own slow start", func() bool { return late.table.SlowStartShare(time.Now()) < 0.3 })
	assert.Equal(t, routing.Some(4), rampedLimit(routing.Some(40), 0.1, 0))
	assert.Equal(t, routing.Some(7), rampedLimit(routing.Opt[int]{}, 0.1, 2))
	assert.Equal(t, routing.Some(40), rampedLimit(routing.Some(40), 1, 50))
	assert.Equal(t, routing.Some(60), rampedLimit(routing.Opt[int]{}, 0.1, 60), "what runs already may be replaced as it ends")
	late.eventually(3*time.Second, "a cap", func() bool { return late.ramp.capped })
}
