//go:build !linux

package proxy

import (
	"crypto/tls"
	"io"
	"net"
	"sync"
)

// fastConn returns nc: elsewhere the runtime's own calls do.
func fastConn(nc net.Conn) net.Conn { return nc }

// sock stands for what there is none of.
type sock struct{ net.Conn }

func (s *sock) lend(*sync.Pool, int) (*[]byte, int, error) { return nil, 0, io.EOF }

func (s *sock) ask(net.Buffers, bool) (left net.Buffers, fresh bool, err error) {
	return nil, false, io.EOF
}

func (s *sock) look() waiting { return waitUnknown }

func (s *sock) writeNow(*tls.Conn, []byte) (whole bool, err error) { return false, io.EOF }

func (s *sock) drain() error { return io.EOF }

func (s *sock) writeVec(net.Buffers) error { return io.EOF }

func (s *sock) comeBack() error { return nil }

func (s *sock) done() {}

func sockOf(net.Conn) *sock { return nil }

func plainConn(nc net.Conn) net.Conn { return nc }
