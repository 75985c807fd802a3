package agent

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestGateways(t *testing.T) {
	assert.Nil(t, gateways(nil))
	in := gateways([]string{"10.0.0.0/8", "192.0.2.7", "2001:db8::/32"})
	for remote, want := range map[string]bool{
		"10.1.2.3:99": true, "[::ffff:10.1.2.3]:99": true, "11.0.0.1:99": false, "192.0.2.7:1": true, "192.0.2.8:1": false,
		"[2001:db8::1]:1": true, "[2001:db9::1]:1": false, "[fe80::1%eth0]:1": false, "@": false, "": false, "10.1.2.3": false,
	} {
		assert.Equal(t, want, in(remote), remote)
	}
}

// neighbours are two free ports of loopback, one after the other, as the client and the peer listener have them by default.
func neighbours(t *testing.T) (client, peer string) {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		client, peer = l.Addr().String(), fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port+1)
		next, err := net.Listen("tcp", peer)
		_ = l.Close()
		if err == nil {
			_ = next.Close()
			return client, peer
		}
	}
	t.Fatal("no two free ports")
	return "", ""
}

// A gateway on this host names a replica by its client address, several agents sharing one host included.
func TestGatewayChoosesAReplica(t *testing.T) {
	t.Parallel()
	agents, _ := fleetOf(t, 2, fast(), func(c *Config) {
		c.Policy, c.TrustGateway = "local", []string{"127.0.0.1"}
		c.Listen, c.PeerListen = neighbours(t)
	})
	a, b := agents[0], agents[1]
	call := func(dest string) string {
		req, err := http.NewRequest("POST", "http://"+a.Addresses().Client+"/v1/chat/completions", strings.NewReader(chatBody))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("x-gateway-destination-endpoint", dest)
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		defer res.Body.Close()
		_, _ = io.Copy(io.Discard, res.Body)
		require.Equal(t, 200, res.StatusCode)
		return res.Header.Get("x-gateway-destination-endpoint-served")
	}
	assert.Equal(t, b.Addresses().Client, call(b.Addresses().Client), "the policy alone would have kept it here")
	a.eventually(5*time.Second, "the record of the pick", func() bool { return len(a.proxy.Picks("")) == 1 }) // it is made behind the answer's end
	assert.Equal(t, "gateway", a.proxy.Picks("")[0].Attempts[0].Reason.String())
	assert.Equal(t, a.Addresses().Client, call(a.Addresses().Client))
	assert.Empty(t, call("127.0.0.1:1"), "no member: as any other request")
	assert.Empty(t, call("169.254.169.254:80"))
}
