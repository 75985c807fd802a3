package proxy

import (
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Connections to peers give up what nobody acknowledges. The rest is the kernel's, and shown in a cut network by test/gossip.
func TestDropWhenCut(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	c, err := newPeerConnector(&Config{}, 1, ln.Addr().String())(t.Context(), "http/1.1")
	require.NoError(t, err)
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	var got int
	require.NoError(t, raw.Control(func(fd uintptr) { got, err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout) }))
	require.NoError(t, err)
	assert.Equal(t, int(cutAfter.Milliseconds()), got)
}
