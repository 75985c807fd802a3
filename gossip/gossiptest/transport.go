package gossiptest

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Transport is one host's memberlist.Transport.
type Transport struct {
	network *Network
	addr    netip.AddrPort
	name    string // addr as text

	packets chan *memberlist.Packet
	streams chan net.Conn
	down    chan struct{}
	once    sync.Once
}

func newTransport(n *Network, addr netip.AddrPort) *Transport {
	return &Transport{
		network: n, addr: addr, name: addr.String(),
		packets: make(chan *memberlist.Packet, inbox), streams: make(chan net.Conn), down: make(chan struct{}),
	}
}

// Addr returns ip:port.
func (t *Transport) Addr() string { return t.name }

// FinalAdvertiseAddr returns the host's address.
func (t *Transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.addr.Addr().AsSlice(), int(t.addr.Port()), nil
}

// WriteTo sends a packet. As with UDP, a packet that nobody gets is no error.
func (t *Transport) WriteTo(b []byte, to string) (time.Time, error) {
	now := time.Now()
	select {
	case <-t.down:
		return now, net.ErrClosed
	default:
	}
	dst, delay := t.network.route(t.name, to, b)
	if dst == nil {
		return now, nil
	}
	p := &memberlist.Packet{Buf: append([]byte(nil), b...), From: net.UDPAddrFromAddrPort(t.addr)}
	time.AfterFunc(delay, func() {
		p.Timestamp = time.Now()
		select {
		case <-dst.down:
		case dst.packets <- p:
		default: // full, as a socket buffer
		}
	})
	return now, nil
}

// PacketCh delivers packets.
func (t *Transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh delivers streams.
func (t *Transport) StreamCh() <-chan net.Conn { return t.streams }

// errRefused is what a host without a listener answers.
var errRefused = errors.New("connection refused")

// DialTimeout opens a stream. A partition swallows the attempt until the timeout; a host without a listener refuses.
func (t *Transport) DialTimeout(to string, timeout time.Duration) (net.Conn, error) {
	dst, delay, cut := t.network.dial(t.name, to)
	if cut {
		delay = timeout
	}
	limit := time.NewTimer(timeout)
	defer limit.Stop()
	wait := time.NewTimer(delay)
	defer wait.Stop()
	select {
	case <-t.down:
		return nil, net.ErrClosed
	case <-wait.C:
	}
	switch {
	case cut:
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errTimeout{}}
	case dst == nil:
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errRefused}
	}
	a, b := net.Pipe()
	here := &stream{Conn: a, network: t.network, from: t.name, to: to, remote: dst.addr}
	there := &stream{Conn: b, network: t.network, from: to, to: t.name, remote: t.addr}
	select {
	case dst.streams <- there:
		return here, nil
	case <-dst.down:
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errRefused}
	case <-t.down:
		return nil, net.ErrClosed
	case <-limit.C:
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errTimeout{}}
	}
}

// Shutdown ends the host.
func (t *Transport) Shutdown() error {
	t.once.Do(func() {
		t.network.forget(t.name, t)
		close(t.down)
	})
	return nil
}

// stream is one end of a connection; a partition breaks it at the next write.
type stream struct {
	net.Conn
	network  *Network
	from, to string
	remote   netip.AddrPort
}

func (s *stream) Write(b []byte) (int, error) {
	if s.network.write(s.from, s.to, b) {
		return 0, &net.OpError{Op: "write", Net: "tcp", Err: errTimeout{}}
	}
	return s.Conn.Write(b)
}

// RemoteAddr names the other host, for memberlist's log lines.
func (s *stream) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(s.remote) }

type errTimeout struct{}

func (errTimeout) Error() string   { return "i/o timeout" }
func (errTimeout) Timeout() bool   { return true }
func (errTimeout) Temporary() bool { return true }
