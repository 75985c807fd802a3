//go:build linux

package gossip

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// Interfaces with the smallest MTU of IPv6, as some overlays have it: packets go out whole.
func TestSmallMTU(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(3, harness.MTU(1280), harness.OnlyIPv6)
	agents := l.StartAll(engines)
	harness.Eventually(t, 10*time.Second, "fresh records", func() bool { return fresh(agents) })
	marks, p := mark(agents), startPulse(t)
	assert.LessOrEqual(t, watch(t, agents, 10*time.Second), heartbeats)
	serve(t, agents)
	nobodyFailed(t, p, agents, marks)
}

// A network that swallows what is longer than some 1,000 bytes, without a word: records and probes are short, and what a join
// has to say goes by TCP.
func TestLargePacketsSwallowed(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(6)
	for _, h := range l.Hosts() {
		h.Filter([]string{"udp length > 1000"}, nil)
	}
	agents := l.StartAll(engines)
	harness.Eventually(t, 20*time.Second, "fresh records", func() bool { return fresh(agents) })
	marks, p := mark(agents), startPulse(t)
	assert.LessOrEqual(t, watch(t, agents, 10*time.Second), heartbeats)
	serve(t, agents)
	nobodyFailed(t, p, agents, marks)
}

func TestOnlyIPv6(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(3, harness.OnlyIPv6)
	agents := l.StartAll(engines)
	harness.Eventually(t, 10*time.Second, "fresh records", func() bool { return fresh(agents) })
	serve(t, agents)
	r, err := agents[0].Report()
	require.NoError(t, err)
	for _, p := range r.Peers {
		assert.Contains(t, p.Address, "[fd77::")
	}
}

// Listeners on all addresses of both families: one agent advertises IPv4, one IPv6, and seeds are of either.
func TestDualStack(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(3)
	open := harness.Env{}
	for name, port := range map[string]int{"LISTEN": harness.ClientPort, "PEER_LISTEN": harness.PeerPort, "STATUS_LISTEN": harness.StatusPort, "GOSSIP_LISTEN": harness.GossipPort} {
		open["GRAPEVINE_"+name] = fmt.Sprintf(":%d", port)
	}
	hosts := l.Hosts()
	var agents []*harness.Agent
	for i, h := range hosts {
		own := harness.Env{"GRAPEVINE_ADVERTISE": []string{h.IP, h.IP6}[i%2]}
		other := hosts[(i+1)%3]
		own["GRAPEVINE_JOIN"] = []string{fmt.Sprintf("%s:%d", other.IP, harness.GossipPort), fmt.Sprintf("[%s]:%d", other.IP6, harness.GossipPort)}[i%2]
		h.Start(engines, open, own)
		agents = append(agents, h.Agent)
	}
	for _, a := range agents {
		a.WaitReady(30 * time.Second)
		a.WaitMembers(3, 70*time.Second)
	}
	harness.Eventually(t, 10*time.Second, "fresh records", func() bool { return fresh(agents) })
	serve(t, agents)
	r, err := agents[0].Report()
	require.NoError(t, err)
	families := map[bool]bool{}
	for _, p := range r.Peers {
		families[strings.HasPrefix(p.Address, "[")] = true
	}
	assert.Len(t, families, 2, "peers of both families")
}

// An agent behind address translation is refused with the reason by all that it joins, and serves its own engine; the others go
// on without it.
func TestTranslation(t *testing.T) {
	longOnly(t)
	if !harness.Isolated(t, "") {
		return
	}
	l := harness.New(t).NewLab(3)
	agents := l.StartAll(engines)
	hidden := l.Hide()
	hidden.Start(engines)
	const why = "it advertises 192.168.77.2:17946, where nothing answers, and its packets come from 10.77.0.100: address translation is not supported"
	for _, a := range agents {
		harness.Eventually(t, 20*time.Second, a.Name+" to refuse it", func() bool {
			_, page := harness.Get(a.Status + "/status")
			return strings.Contains(a.Log(), why) && strings.Contains(page, why)
		})
	}
	marks, p := mark(agents), startPulse(t)
	time.Sleep(15 * time.Second)
	for _, a := range agents {
		r, err := a.Report()
		require.NoError(t, err)
		assert.Equal(t, 3, r.Gossip.Members)
		assert.LessOrEqual(t, strings.Count(a.Log(), "192.168.77.2:18081"), 4, "it does not come and go")
	}
	nobodyFailed(t, p, agents, marks)
	serve(t, agents)
	assert.True(t, hidden.Agent.Alive())
	_, state := hidden.Agent.Line("ready")
	assert.True(t, state, hidden.Agent.Log())
}
