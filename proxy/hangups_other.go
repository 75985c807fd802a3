//go:build !linux

package proxy

// hangupSet watches nothing here.
type hangupSet struct{}

func newHangups() *hangups { return &hangups{} }

func (*hangups) watch(*wireServerConn) bool { return false }
func (*hangups) forget(*wireServerConn)     {}
func (*hangups) close()                     {}
