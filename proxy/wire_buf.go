package proxy

import (
	"errors"
	"io"
	"net"
	"sync"

	"github.com/grapevine-lb/grapevine/proxy/h1"
)

// headPiece is what is read at once while a head is awaited. A head that does not fit doubles its buffer.
const headPiece = 4 << 10

var headPieces = sync.Pool{New: func() any { b := make([]byte, headPiece); return &b }}

var errHeadSize = errors.New("the head is too large")

// headBuf holds what was read from a connection and is not consumed: (*buf)[r:w]. A connection that waits holds none.
type headBuf struct {
	buf  *[]byte
	r, w int
}

// more reads once.
func (h *headBuf) more(from io.Reader) error {
	if s, ok := from.(*sock); ok && h.buf == nil {
		b, n, err := s.lend(&headPieces, -1)
		switch {
		case n > 0:
			h.buf, h.r, h.w = b, 0, n
			return nil
		case b != nil:
			headPieces.Put(b)
		}
		return err
	}
	if h.buf == nil {
		h.hold(headPiece)
	}
	if h.r > 0 {
		h.w = copy(*h.buf, (*h.buf)[h.r:h.w])
		h.r = 0
	}
	if h.w == len(*h.buf) {
		if h.w > h1.MaxHead {
			return errHeadSize // the parser has refused it before
		}
		bigger := make([]byte, 2*h.w)
		copy(bigger, *h.buf)
		h.buf = &bigger
	}
	n, err := from.Read((*h.buf)[h.w:])
	h.w += n
	if n > 0 {
		return nil
	}
	return err
}

// take copies what is there to p.
func (h *headBuf) take(p []byte) int {
	n := copy(p, (*h.buf)[h.r:h.w])
	h.r += n
	h.dropEmpty()
	return n
}

// putBack makes bytes that were taken the next to be read again.
func (h *headBuf) putBack(p []byte) {
	switch {
	case len(p) == 0:
	case h.buf != nil: // they stood just before h.r
		h.r -= len(p)
		copy((*h.buf)[h.r:], p)
	default:
		h.hold(len(p))
		h.w = copy(*h.buf, p)
	}
}

// hold begins an empty buffer of at least n bytes.
func (h *headBuf) hold(n int) {
	h.r, h.w = 0, 0
	if n <= headPiece {
		h.buf = headPieces.Get().(*[]byte)
		return
	}
	b := make([]byte, n)
	h.buf = &b
}

// dropEmpty gives the buffer back if nothing is left in it.
func (h *headBuf) dropEmpty() {
	if h.r == h.w {
		h.drop()
	}
}

func (h *headBuf) drop() {
	if h.buf != nil && len(*h.buf) == headPiece {
		headPieces.Put(h.buf)
	}
	*h = headBuf{}
}

// writeVec writes pieces with as few calls as can be.
func writeVec(nc net.Conn, vec net.Buffers) error {
	if s, ok := nc.(*sock); ok {
		return s.writeVec(vec)
	}
	if len(vec) == 1 {
		_, err := nc.Write(vec[0])
		return err
	}
	all := vec // its place escapes
	_, err := all.WriteTo(nc)
	return err
}
