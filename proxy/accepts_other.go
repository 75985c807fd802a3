//go:build !linux

package proxy

import "net"

// LastAccepts does nothing here: what has connected when the listener closes and is not accepted yet is reset.
func LastAccepts(net.Listener) {}
