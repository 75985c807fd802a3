package gossip

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTransport(t *testing.T) {
	for name, tc := range map[string]struct{ bind, advertise string }{
		"IPv4":          {"127.0.0.1", "127.0.0.1"},
		"IPv6":          {"::1", "::1"},
		"dual stack, 4": {"", "127.0.0.1"},
		"dual stack, 6": {"", "::1"},
	} {
		t.Run(name, func(t *testing.T) {
			if netip.MustParseAddr(tc.advertise).Is6() && !hasIPv6() {
				t.Skip("no IPv6 on this host")
			}
			var bind netip.Addr
			if tc.bind != "" {
				bind = netip.MustParseAddr(tc.bind)
			}
			a, err := listen(bind, 0, netip.MustParseAddr(tc.advertise), nil)
			require.NoError(t, err)
			b, err := listen(bind, 0, netip.MustParseAddr(tc.advertise), nil)
			require.NoError(t, err)
			defer func() { assert.NoError(t, a.Shutdown()); assert.NoError(t, a.Shutdown(), "again") }()
			ip, port, err := b.FinalAdvertiseAddr("", 0)
			require.NoError(t, err)
			to := netip.AddrPortFrom(netip.MustParseAddr(ip.String()), uint16(port)).String()

			want := bytes.Repeat([]byte{7}, 1200)
			_, err = a.WriteTo(want, to)
			require.NoError(t, err)
			select {
			case p := <-b.PacketCh():
				assert.Equal(t, want, p.Buf)
				assert.Less(t, cap(p.Buf), 2048, "an exact copy, not the scratch buffer")
				host, _, _ := net.SplitHostPort(p.From.String())
				assert.Equal(t, tc.advertise, host)
			case <-time.After(2 * time.Second):
				t.Fatal("no packet")
			}

			got := make(chan net.Conn, 1)
			go func() { got <- <-b.StreamCh() }()
			c, err := a.DialTimeout(to, time.Second)
			require.NoError(t, err)
			defer func() { _ = c.Close() }()
			s := <-got
			_ = s.Close()

			require.NoError(t, b.Shutdown())
			_, err = a.DialTimeout(to, time.Second)
			require.Error(t, err)
		})
	}
}

func hasIPv6() bool {
	ln, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		return false
	}
	_ = ln.Close()
	return true
}

func TestTransportPortTaken(t *testing.T) {
	ip := netip.MustParseAddr("127.0.0.1")
	a, err := listen(ip, 0, ip, nil)
	require.NoError(t, err)
	defer func() { _ = a.Shutdown() }()
	_, err = listen(ip, a.port, ip, nil)
	require.ErrorContains(t, err, "gossip listen: listen tcp 127.0.0.1:")
	require.ErrorContains(t, err, "address already in use")
}

// Shutdown ends a dial into the void at once instead of after memberlist's 3 s.
func TestTransportShutdownEndsDial(t *testing.T) {
	ip := netip.MustParseAddr("127.0.0.1")
	a, err := listen(ip, 0, ip, nil)
	require.NoError(t, err)
	began := time.Now()
	time.AfterFunc(50*time.Millisecond, func() { _ = a.Shutdown() })
	_, err = a.DialTimeout("192.0.2.1:9", 10*time.Second) // may also fail at once where there is no route
	require.Error(t, err)
	assert.Less(t, time.Since(began), 2*time.Second)
	_, err = a.WriteTo([]byte{1}, "127.0.0.1:9")
	assert.NoError(t, err, "the last packet of a ticker is nothing to log")
}

func BenchmarkTransport(b *testing.B) {
	ip := netip.MustParseAddr("127.0.0.1")
	t, err := listen(ip, 0, ip, nil)
	require.NoError(b, err)
	defer func() { _ = t.Shutdown() }()
	to := netip.AddrPortFrom(ip, t.port).String()
	msg := bytes.Repeat([]byte{1}, 62)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := t.WriteTo(msg, to); err != nil {
			b.Fatal(err)
		}
		<-t.PacketCh()
	}
}
