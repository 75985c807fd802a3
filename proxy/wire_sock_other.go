//go:build !linux

package proxy

import "net"

// fastConn returns nc: elsewhere the runtime's own calls do.
func fastConn(nc net.Conn) net.Conn { return nc }

func plainConn(nc net.Conn) net.Conn { return nc }
