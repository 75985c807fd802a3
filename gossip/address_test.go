package gossip

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakeDNS answers from maps.
type fakeDNS struct {
	hosts map[string][]netip.Addr
	srv   map[string][]*net.SRV
}

func (f fakeDNS) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	if a, ok := f.hosts[host]; ok {
		return a, nil
	}
	return nil, errors.New("no such host")
}

func (f fakeDNS) LookupSRV(_ context.Context, _, _, name string) (string, []*net.SRV, error) {
	if s, ok := f.srv[name]; ok {
		return name, s, nil
	}
	return "", nil, errors.New("no such host")
}

func TestRequireKey(t *testing.T) {
	key := [][]byte{bytes.Repeat([]byte{1}, 32)}
	for _, ok := range []string{"127.0.0.1:7946", "[::1]:7946", "localhost:0"} {
		require.NoError(t, RequireKey(ok, nil, false), ok)
	}
	for _, open := range []string{":7946", "0.0.0.0:7946", "[::]:0", "10.0.0.1:7946"} {
		require.ErrorIs(t, RequireKey(open, nil, false), ErrKeyRequired, open)
		require.NoError(t, RequireKey(open, key, false), open)
		require.NoError(t, RequireKey(open, nil, true), open)
	}
	require.Error(t, RequireKey("nonsense", nil, false))
}

func TestAdvertiseAddr(t *testing.T) {
	dns := fakeDNS{hosts: map[string][]netip.Addr{
		"dual": {netip.MustParseAddr("fd00::5"), netip.MustParseAddr("10.9.9.9")},
		"six":  {netip.MustParseAddr("fd00::5")},
		"none": {},
	}}
	for _, tc := range []struct{ listen, advertise, want, err string }{
		{"127.0.0.1:0", "", "127.0.0.1", ""},
		{"10.1.2.3:7946", "", "10.1.2.3", ""},
		{":7946", "10.1.2.3", "10.1.2.3", ""},
		{":7946", "10.1.2.3:7946", "10.1.2.3", ""},
		{":7946", "fd00::1", "fd00::1", ""},
		{":7946", "[fd00::1]:7946", "fd00::1", ""},
		{":7946", "::ffff:10.1.2.3", "10.1.2.3", ""},
		{":7946", "dual", "10.9.9.9", ""},
		{":7946", "six", "fd00::5", ""},
		{":7946", "10.1.2.3:1234", "", `advertise "10.1.2.3:1234": the port must be that of the gossip listener, 7946 (address translation to another port is not supported)`},
		{":7946", "0.0.0.0", "", `advertise "0.0.0.0": no peer can reach the unspecified address; give the address that peers use, such as the pod IP`},
		{":7946", "224.0.0.1", "", `advertise "224.0.0.1": not the address of one host`},
		{":7946", "fe80::1%eth0", "", `advertise "fe80::1%eth0": a link-local address with a zone means nothing to peers`},
		{":7946", "nowhere", "", `advertise "nowhere": neither an IP address nor a name that resolves: no such host`},
		{":7946", "none", "", `advertise "none": the name resolves to no address`},
		{"127.0.0.1:7946", "10.1.2.3", "", `advertise "10.1.2.3": gossip listens on loopback only (127.0.0.1:7946)`},
		{"10.1.2.3:7946", "fd00::1", "", `advertise "fd00::1": gossip listens on the other address family (10.1.2.3:7946)`},
		{"7946", "", "", `listen address "7946": want host:port or :port`},
		{":99999", "", "", `listen address ":99999": port "99999" is not 0 to 65535`},
		{"host:1", "", "", `listen address "host:1": host is not an IP address`},
	} {
		got, err := AdvertiseAddr(tc.listen, tc.advertise, dns)
		if tc.err != "" {
			require.EqualError(t, err, tc.err)
			continue
		}
		require.NoError(t, err, tc)
		assert.Equal(t, tc.want, got.String())
	}
	got, err := AdvertiseAddr(":0", "", dns)
	require.NoError(t, err)
	assert.True(t, got.IsValid() && !got.IsUnspecified())
	assert.True(t, isLocal(got), "the address of the default route is one of ours")
	assert.False(t, isLocal(netip.MustParseAddr("192.0.2.77")))
}
