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
