package gossip

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/routing"
)

// C101: a member may name no host but itself as the place where prompts go.
func TestC101Targets(t *testing.T) {
	far := &Node{addr: "10.0.0.1:7946", self: routing.Member{Addr: "10.0.0.1:8081"}, id: identity{pod: "me"}}
	near := &Node{addr: "127.0.0.1:7946", self: routing.Member{Addr: "127.0.0.1:8081"}, id: identity{pod: "me"}}
	for _, c := range []struct {
		n        *Node
		from, to string
		ok       bool
	}{
		{far, "10.0.0.2", "10.0.0.2:8081", true},
		{far, "10.0.0.2", "10.0.0.2:18081", true}, // the port is its choice
		{far, "10.0.0.1", "10.0.0.1:8181", true},  // another agent on our host
		{far, "fd00::2", "[fd00::2]:8081", true},
		{far, "::ffff:10.0.0.2", "10.0.0.2:8081", true},
		{far, "10.0.0.2", "169.254.169.254:80", false},
		{far, "169.254.1.1", "169.254.1.1:8081", false},
		{far, "fe80::1", "[fe80::1]:8081", false},
		{far, "10.0.0.2", "127.0.0.1:8000", false},
		{far, "127.0.0.1", "127.0.0.1:8081", false},
		{far, "::1", "[::1]:8081", false},
		{far, "10.0.0.2", "10.0.0.3:8081", false},
		{far, "10.0.0.2", "10.0.0.1:8081", false},
		{far, "10.0.0.1", "10.0.0.1:8081", false}, // our own under another name
		{far, "10.0.0.2", "0.0.0.0:8081", false},
		{far, "10.0.0.2", "224.0.0.1:8081", false},
		{far, "10.0.0.2", "metadata.internal:80", false},
		{far, "10.0.0.2", "10.0.0.2:0", false},
		{far, "10.0.0.2", "10.0.0.2", false},
		{near, "127.0.0.1", "127.0.0.1:9001", true},
		{near, "127.0.0.1", "127.0.0.2:9001", true},
		{near, "127.0.0.1", "127.0.0.1:8081", false},
		{near, "127.0.0.1", "169.254.169.254:80", false},
		{near, "127.0.0.1", "10.0.0.1:80", false},
	} {
		err := c.n.checkTarget(identity{Member: routing.Member{Addr: c.to}, pod: "other"}, net.ParseIP(c.from))
		assert.Equal(t, c.ok, err == nil, "from %s to %s: %v", c.from, c.to, err)
	}
}
