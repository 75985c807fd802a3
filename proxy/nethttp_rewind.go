package proxy

import (
	"errors"
	"io"
	"sync"
)

// keepSent is how much of a request that goes through while it is read is kept until its answer begins.
const keepSent = 64 << 10 // bytes

var errNotKept = errors.New("more of the request went out than is kept")

// rewinder keeps the beginning of a body that can be read once, for the case that an HTTP/2 server says that it did not
// process the request (GOAWAY with a lower stream, REFUSED_STREAM): then the transport sends it again (C38, C44). That is
// decided before an answer begins; seal ends it.
type rewinder struct {
	src     io.ReadCloser
	reading sync.Mutex // held while the source is read, maybe for long: what an earlier reader still gets is not lost

	mu   sync.Mutex // guards what follows
	kept []byte
	lost bool  // the source was read past what is kept
	err  error // why the source ended
	refs int
	done bool // sealed
}

// reader returns a reader from the first byte.
func (w *rewinder) reader() (io.ReadCloser, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lost {
		return nil, errNotKept
	}
	w.refs++
	return &rewindReader{w: w}, nil
}

// seal says that the request will not be sent again. The source is closed when nobody reads it any more.
func (w *rewinder) seal() {
	w.mu.Lock()
	w.done = true
	last := w.refs == 0
	w.mu.Unlock()
	if last {
		_ = w.src.Close()
	}
}

type rewindReader struct {
	w    *rewinder
	at   int // bytes of what is kept that were read here
	once sync.Once
}

func (r *rewindReader) Read(p []byte) (int, error) {
	if n, err, ok := r.fromKept(p); ok {
		return n, err
	}
	w := r.w
	w.reading.Lock()
	defer w.reading.Unlock()
	if n, err, ok := r.fromKept(p); ok { // somebody else read meanwhile
		return n, err
	}
	n, err := w.src.Read(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
	if !w.lost && !w.done && len(w.kept)+n <= keepSent {
		w.kept = append(w.kept, p[:n]...)
		r.at += n
	} else if n > 0 {
		w.lost, w.kept, r.at = true, nil, 0
	}
	return n, err
}

func (r *rewindReader) fromKept(p []byte) (n int, err error, ok bool) {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.at < len(w.kept) {
		n := copy(p, w.kept[r.at:])
		r.at += n
		return n, nil, true
	}
	return 0, w.err, w.err != nil
}

func (r *rewindReader) Close() error {
	r.once.Do(func() {
		w := r.w
		w.mu.Lock()
		w.refs--
		last := w.done && w.refs == 0
		w.mu.Unlock()
		if last {
			_ = w.src.Close()
		}
	})
	return nil
}
