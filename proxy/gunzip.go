package proxy

import (
	"compress/gzip"
	"errors"
	"io"
	"iter"
)

// Bounds of the peek into a compressed body: what is read of it, and how far it may grow over its own size.
const (
	gunzipMost  = 256 << 20
	gunzipRatio = 200
)

// gunzip decompresses a body that arrives in pieces: a gzip.Reader, which wants to pull, is run as a coroutine
// that stops where the present piece ends. Nothing runs between the calls.
type gunzip struct {
	next  func() (struct{}, bool)
	stop  func()
	piece []byte // what write brought
	last  bool   // no more pieces
	in    int64
	out   int64
	err   error
}

func newGunzip(feed func([]byte)) *gunzip {
	g := new(gunzip)
	g.next, g.stop = iter.Pull(func(yield func(struct{}) bool) {
		r, err := gzip.NewReader(pulled{g, yield})
		if err != nil {
			g.err = err
			return
		}
		buf := make([]byte, 32<<10)
		for {
			n, err := r.Read(buf)
			feed(buf[:n])
			g.out += int64(n)
			switch {
			case errors.Is(err, io.EOF):
				return
			case err != nil:
				g.err = err
				return
			case g.out > gunzipMost || g.out > 1<<20 && g.out > gunzipRatio*g.in:
				g.err = errPeekBomb
				return
			}
		}
	})
	return g
}

// write decompresses one piece as far as it goes.
func (g *gunzip) write(b []byte) error {
	g.piece = b
	g.in += int64(len(b))
	g.next()
	g.piece = nil
	return g.err
}

// finish tells that the body is whole.
func (g *gunzip) finish() error {
	g.last = true
	g.next()
	g.stop()
	return g.err
}

// close ends the coroutine; it may be called after finish.
func (g *gunzip) close() {
	g.last = true
	g.stop()
}

// pulled is the compressed side as the gzip.Reader sees it.
type pulled struct {
	g     *gunzip
	yield func(struct{}) bool
}

// Read implements io.Reader.
func (p pulled) Read(b []byte) (int, error) {
	for len(p.g.piece) == 0 {
		if p.g.last || !p.yield(struct{}{}) {
			return 0, io.EOF // gzip makes ErrUnexpectedEOF of it where it is
		}
	}
	n := copy(b, p.g.piece)
	p.g.piece = p.g.piece[n:]
	return n, nil
}

// ReadByte implements io.ByteReader, so that flate reads no further than it must and adds no buffer.
func (p pulled) ReadByte() (byte, error) {
	var b [1]byte
	_, err := p.Read(b[:])
	return b[0], err
}
