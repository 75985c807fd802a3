package harness

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestIsolated(t *testing.T) {
	if !Isolated(t, Drop("udp dport 17946")) {
		return
	}
	s := New(t)
	for _, tt := range []struct {
		port    int
		arrives bool
	}{{17947, true}, {GossipPort, false}} {
		in, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(s.IP(1)), Port: tt.port})
		require.NoError(t, err)
		defer in.Close()
		out, err := net.Dial("udp", in.LocalAddr().String())
		require.NoError(t, err)
		defer out.Close()
		_, err = out.Write([]byte("hello"))
		require.NoError(t, err, "a drop in the input hook is silent")
		in.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err = in.Read(make([]byte, 10))
		require.Equal(t, tt.arrives, err == nil, "port %d", tt.port)
	}
}
