//go:build linux

package gossip

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// UDP of one of three agents is dropped, both ways, then one way: nobody is found dead, its records come over the peer link, a
// warning names it and the port, and it goes when the packets come again.
func TestBlockedUDP(t *testing.T) {
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(3)
	agents := l.StartAll(engines)
	p := startPulse(t)
	mute, marks := l.Hosts(3)[0], mark(agents)
	name := nodeName(t, mute.Agent)
	for _, way := range []struct {
		name    string
		in, out []string
		all     bool // the full time only with -long
	}{{"both ways", []string{"meta l4proto udp"}, []string{"meta l4proto udp"}, false}, {"what it sends", nil, []string{"meta l4proto udp"}, true}, {"what is sent to it", []string{"meta l4proto udp"}, nil, true}} {
		if way.all && !*long {
			continue
		}
		mute.Filter(way.in, way.out)
		began := time.Now()
		if way.out != nil {
			harness.Eventually(t, 15*time.Second, "the others to warn", func() bool { return warned(agents[0], name) && warned(agents[1], name) })
		} else {
			harness.Eventually(t, 15*time.Second, "the deaf one to warn", func() bool { return warned(mute.Agent, nodeName(t, agents[0])) })
		}
		took := time.Since(began).Round(10 * time.Millisecond)
		rest := 2 * time.Second
		if *long {
			rest = 20 * time.Second
		}
		oldest := watch(t, agents, rest)
		serve(t, agents)
		assert.LessOrEqual(t, oldest, 2*heartbeats, "records over the peer link, asked for after three heartbeats and then once a second")
		nobodyFailed(t, p, agents, marks)
		mute.Clear()
		harness.Eventually(t, 10*time.Second, "the warning to go", func() bool { return !warned(agents[0], name) && !warned(mute.Agent, nodeName(t, agents[0])) })
		harness.Eventually(t, 5*time.Second, "fresh records", func() bool { return fresh(agents) })
		t.Logf("%s: warned after %v, oldest record %v", way.name, took, oldest)
	}
}

// Five agents lose a share of all their packets.
func TestPackets(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(5)
	agents := l.StartAll(engines)
	p := startPulse(t)
	for _, percent := range []int{5, 20} {
		marks := mark(agents)
		l.Lose(percent, "meta l4proto udp")
		oldest := watch(t, agents, 30*time.Second)
		serve(t, agents)
		n := failures(agents, marks)
		t.Logf("%d %% of UDP lost for 30 s: oldest record %v, %d failed events", percent, oldest, n)
		if percent == 5 {
			gossiptest.Figure(t, 5, "5 real agents for 30 s: oldest record %v, %d failed events", oldest, n)
		}
		nobodyFailed(t, p, agents, marks)
		// Of a fifth, three in a row are lost now and then; then the record is asked for over the peer link.
		assert.LessOrEqual(t, oldest, map[int]time.Duration{5: heartbeats, 20: 2 * heartbeats}[percent])
		l.Heal()
	}
	// And of TCP too: slower, but nobody is found dead.
	marks := mark(agents)
	l.Lose(5, "meta l4proto { tcp, udp }")
	watch(t, agents, 15*time.Second)
	serve(t, agents)
	nobodyFailed(t, p, agents, marks)
	l.Heal()
}

// The link of one of five is cut and comes back. Requests that were on the way to it, or are sent there before the others know,
// do not wait for the kernel to give up.
func TestCutLink(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(5)
	agents := l.StartAll(engines, harness.Env{"GRAPEVINE_POLICY": "round_robin"})
	serve(t, agents) // connections between all
	l.Cut(l.Hosts(1, 2, 3, 4), l.Hosts(5))
	longest := serve(t, agents) // at once, into the cut
	assert.LessOrEqual(t, longest, 25*time.Second)
	harness.Eventually(t, 10*time.Second, "the cut to be known", func() bool {
		r, err := agents[0].Report()
		return err == nil && r.Gossip.Members == 4
	})
	t.Logf("longest request over the cut %v; once it is known %v", longest.Round(time.Millisecond), serve(t, agents).Round(time.Millisecond))
	time.Sleep(5 * time.Second)
	l.Heal()
	began := time.Now()
	harness.Eventually(t, 15*time.Second, "all together again", func() bool { return fresh(agents) })
	t.Logf("link of one cut: all fresh %v after it came back", time.Since(began).Round(10*time.Millisecond))
}
