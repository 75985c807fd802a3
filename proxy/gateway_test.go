package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// A destination counts if a trusted gateway names a member; what it cannot serve goes elsewhere, and no engine sees it.
func TestGatewayDestination(t *testing.T) {
	for name, row := range map[string]struct {
		untrusted bool
		header    []string
		by        int    // engine that answers; the policy alone would take the first
		reason    string // of the first attempt
		served    string
	}{
		"named":                 {false, []string{headerDestination, "peer3:8080"}, 3, "gateway", "peer3:8080"},
		"ourselves":             {false, []string{headerDestination, "peer1:8080"}, 1, "gateway", "peer1:8080"},
		"several, first member": {false, []string{headerDestination, "10.9.9.9:8080, peer3:8080,peer1:8080"}, 3, "gateway", "peer3:8080"},
		"it does not take it":   {false, []string{headerDestination, "peer2:8080"}, 1, "gateway", "peer1:8080"},
		"not trusted":           {true, []string{headerDestination, "peer3:8080"}, 1, "best", ""},
		"no member":             {false, []string{headerDestination, "169.254.169.254:80"}, 1, "best", ""},
		"no address":            {false, []string{headerDestination, "peer3"}, 1, "best", ""},
		"said twice":            {false, []string{headerDestination, "peer3:8080", headerDestination, "peer3:8080"}, 1, "best", ""},
		"nothing":               {false, nil, 1, "best", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*scripted{answers(200, `{}`), answers(503, `{}`), answers(200, `{}`, headerServed, "forged:1")}
				f := newFleet(t, []uint64{1, 3}, func(_ int, c *Config) {
					c.TrustGateway = func(string) bool { return !row.untrusted }
				}, engines[0], engines[1], engines[2])
				resp, _, err := f.get(chatBody(false), row.header...)
				require.NoError(t, err)
				assert.Equal(t, 200, resp.StatusCode)
				assert.Equal(t, 1, engines[row.by-1].count())
				assert.Equal(t, row.reason, f.agents[0].Picks("")[0].Attempts[0].Reason.String())
				if row.by == 1 || row.served != "" {
					assert.Equal(t, row.served, resp.Header.Get(headerServed))
				}
				assert.Empty(t, engines[row.by-1].last().Get(headerDestination))
				f.idle()
			})
		})
	}
}

func TestMemberAt(t *testing.T) {
	table := func(addrs ...string) *routing.Snapshot {
		tab := routing.NewTable(routing.Member{Boot: 1, Node: "n1", Addr: addrs[0]})
		for i, a := range addrs[1:] {
			tab.SetMember(routing.Member{Boot: uint64(i + 2), Addr: a}, time.Now())
		}
		return tab.Snapshot()
	}
	for _, row := range []struct {
		members    []string
		host, port string
		boot       uint64
	}{
		{[]string{"10.0.0.1:8081", "10.0.0.2:8081"}, "10.0.0.2", "8080", 2},
		{[]string{"10.0.0.1:8081", "10.0.0.2:8081"}, "10.0.0.2", "80", 2},
		{[]string{"10.0.0.1:8081", "10.0.0.2:8081"}, "10.0.0.3", "8080", 0},
		{[]string{"10.0.0.1:8081", "[2001:db8::2]:8081"}, "2001:db8:0::2", "8080", 2},
		{[]string{"10.0.0.1:9001", "10.0.0.1:9011", "10.0.0.1:9021"}, "10.0.0.1", "9010", 2},
		{[]string{"10.0.0.1:9001", "10.0.0.1:9011", "10.0.0.1:9021"}, "10.0.0.1", "9011", 0},
		{[]string{"10.0.0.1:9001", "10.0.0.1:9011", "10.0.0.1:9021"}, "10.0.0.1", "http", 0},
	} {
		got := memberAt(table(row.members...), row.host, row.port)
		if row.boot == 0 {
			assert.Nil(t, got, "%+v", row)
		} else if assert.NotNil(t, got, "%+v", row) {
			assert.Equal(t, row.boot, got.Boot(), "%+v", row)
		}
	}
}
