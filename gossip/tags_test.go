package gossip

import (
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

func TestTags(t *testing.T) {
	id := identity{
		Member: routing.Member{Boot: 0xAB, Node: "n.000000ab", Addr: "10.0.0.1:8081", Zone: "z1", Engine: "vllm", Version: 1},
		pod:    "n", cluster: "blue", keys: "00112233", models: routing.Some[uint32](7),
	}
	got, err := parseTags("n.000000ab", net.IPv4(10, 0, 0, 9), id.tags())
	require.NoError(t, err)
	assert.Equal(t, id, got)

	for addr, want := range map[string]string{":8081": "10.0.0.9:8081", "0.0.0.0:8081": "10.0.0.9:8081", "[::]:8081": "10.0.0.9:8081", "host:8081": "host:8081"} {
		id.Addr = addr
		got, err = parseTags("n", net.IPv4(10, 0, 0, 9), id.tags())
		require.NoError(t, err)
		assert.Equal(t, want, got.Addr)
	}
	for name, tags := range map[string]map[string]string{
		"stock agent": nil,
		"short boot":  {tagBoot: "ab", tagAddr: "h:1"},
		"no address":  {tagBoot: "00000000000000ab"},
	} {
		_, err := parseTags("n", net.IPv4(10, 0, 0, 9), tags)
		assert.Error(t, err, name)
	}
}

func TestNodeName(t *testing.T) {
	for in, want := range map[string]string{
		"pod-1":                  "pod-1.11223344",
		"my_pod x":               "my-pod-x.11223344",
		"":                       "agent.11223344",
		"_":                      "agent.11223344",
		strings.Repeat("a", 300): strings.Repeat("a", 100) + ".11223344",
	} {
		assert.Equal(t, want, NodeName(in, 0x1122334455667788))
	}
}
