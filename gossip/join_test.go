package gossip

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseSeed(t *testing.T) {
	for _, tc := range []struct {
		in, host string
		port     uint16
		srv      bool
		err      string
	}{
		{in: "10.0.0.1", host: "10.0.0.1", port: 7946},
		{in: "10.0.0.1:99", host: "10.0.0.1", port: 99},
		{in: "fd00::1", host: "fd00::1", port: 7946},
		{in: "[fd00::1]", host: "fd00::1", port: 7946},
		{in: "[fd00::1]:99", host: "fd00::1", port: 99},
		{in: "headless.ns.svc", host: "headless.ns.svc", port: 7946},
		{in: "headless:99", host: "headless", port: 99},
		{in: "srv+_gossip._tcp.x", host: "_gossip._tcp.x", srv: true},
		{in: "", err: `join address "": want host, host:port or srv+name`},
		{in: "host:0", err: `join address "host:0": port "0" is not 1 to 65535`},
		{in: "host:x", err: `join address "host:x": port "x" is not 1 to 65535`},
		{in: "http://host", err: `join address "http://host": want host, host:port or srv+name`},
		{in: "]::", err: `join address "]::": want host, host:port or srv+name`},
		{in: "srv+", err: `join address "srv+": want srv+name`},
		{in: "srv+a:1", err: `join address "srv+a:1": want srv+name`},
	} {
		host, port, srv, err := parseSeed(tc.in, DefaultPort)
		if tc.err != "" {
			require.EqualError(t, err, tc.err)
			require.Error(t, ParseJoin([]string{"ok", tc.in}))
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, tc.host, host)
		assert.Equal(t, tc.srv, srv)
		assert.Equal(t, tc.port, port)
	}
}

func TestLookup(t *testing.T) {
	dns := fakeDNS{
		hosts: map[string][]netip.Addr{
			"headless": {netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("::ffff:10.0.0.2"), netip.MustParseAddr("fd00::3")},
			"pod-0":    {netip.MustParseAddr("10.0.0.9")},
		},
		srv: map[string][]*net.SRV{"_g._tcp.x": {{Target: "pod-0.", Port: 77}, {Target: "gone.", Port: 78}}},
	}
	j := &joiner{port: 7946, resolver: dns}
	for in, want := range map[string][]string{
		"10.0.0.1":      {"10.0.0.1:7946"},
		"[fd00::1]:5":   {"[fd00::1]:5"},
		"headless":      {"10.0.0.1:7946", "10.0.0.2:7946", "[fd00::3]:7946"},
		"headless:5":    {"10.0.0.1:5", "10.0.0.2:5", "[fd00::3]:5"},
		"srv+_g._tcp.x": {"10.0.0.9:77"},
	} {
		got, err := j.lookup(context.Background(), in)
		require.NoError(t, err, in)
		assert.Equal(t, want, got, in)
	}
	for _, in := range []string{"nowhere", "srv+nowhere"} {
		_, err := j.lookup(context.Background(), in)
		assert.EqualError(t, err, "does not resolve: no such host", in)
	}
}

func TestExplain(t *testing.T) {
	for in, want := range map[string]string{
		"1 error occurred:\n\t* failed to join 1.2.3.4:5: dial tcp 1.2.3.4:5: connect: connection refused\n\n": "failed to join 1.2.3.4:5: dial tcp 1.2.3.4:5: connect: connection refused",
		"failed to join a: EOF": "failed to join a: EOF (it hung up: another GRAPEVINE_CLUSTER or GRAPEVINE_GOSSIP_KEY, or no gossip port)",
		"failed to join a: no installed keys could decrypt the message": "failed to join a: no installed keys could decrypt the message (another GRAPEVINE_GOSSIP_KEY there)",
	} {
		assert.Equal(t, want, explain(errors.New(in)))
	}
}
