package proxy

import (
	"crypto/tls"
	"net"
)

// waiting is what a connection has to say before it is read.
type waiting uint8

const (
	waitUnknown waiting = iota // it has no descriptor to look at (in-memory networks)
	waitNothing                // open and silent
	waitData
	waitClosed // ended or broken
)

// below is the connection under TLS and whatever else is wrapped around it.
func below(nc net.Conn) net.Conn {
	for {
		w, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nc
		}
		nc = w.NetConn()
	}
}

// underTLS is what ends a connection at once, whatever its owner is doing: TLS would say goodbye first, and wait for who writes.
func underTLS(nc net.Conn) net.Conn {
	if t, ok := nc.(*tls.Conn); ok {
		return t.NetConn()
	}
	return nc
}

// FastListener accepts connections whose reads and writes cost less where that is possible (see sock). Server does this
// by itself for plain connections; under TLS it must be done below.
func FastListener(l net.Listener) net.Listener { return fastListener{l} }

type fastListener struct{ net.Listener }

// Accept implements net.Listener.
func (l fastListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return fastConn(nc), nil
}

// quiet reports whether an idle connection can be used: still open, and nothing waits on it that nobody asked for.
// Over TLS what waits may be a session ticket.
func quiet(nc net.Conn) bool {
	switch peekConn(nc) {
	case waitClosed:
		return false
	case waitData:
		_, secure := nc.(*tls.Conn)
		return secure
	}
	return true
}
