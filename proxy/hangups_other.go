//go:build !linux

package proxy

import "net"

// hangupSet watches nothing here.
type hangupSet struct{}

func newHangups(bool) *hangups { return &hangups{} }

func (*hangups) open()                      {}
func (*hangups) watch(net.Conn, ender) bool { return false }
func (*hangups) forget(net.Conn, ender)     {}
func (*hangups) request()                   {}
func (*hangups) relays() bool               { return false }
func (*hangups) take(*pump) error           { return nil }
func (*hangups) shut()                      {}
