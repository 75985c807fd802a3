package proxy

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// budget bounds the connections of one listener, those that net/http serves among them.
type budget struct {
	max    int          // 0 = no limit
	handed atomic.Int64 // connections that net/http has
	warned atomic.Int64 // when a line was written last, ns since 1970
}

// overEvery is the least time between two lines about the limit.
const overEvery = 10 * time.Second

// youngest is how long a connection without a request is safe from being dropped for another.
const youngest = time.Second

// makeRoom reports whether a further connection may be served. At the limit the place of one is taken that has no request
// under way: one of those who only hold connections, more likely than not, since good clients are busy or can come again.
func (s *Server) makeRoom() bool {
	b := &s.budget
	if b.max <= 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns)+int(b.handed.Load()) < b.max {
		return true
	}
	s.p.metrics.refusals.add(reasonConnections)
	if now, last := time.Now().UnixNano(), b.warned.Load(); now-last > int64(overEvery) && b.warned.CompareAndSwap(last, now) {
		s.p.log.Warn("as many connections as there may be; waiting ones are closed", "limit", b.max)
	}
	old := time.Now().Add(-youngest).UnixNano()
	for c := range s.conns { // Go's order is random, so nobody can make it drop the others
		if !c.serving.Load() && c.since.Load() < old {
			delete(s.conns, c)
			_ = c.nc.Close()
			return true
		}
	}
	return false
}

const reasonConnections = "max_connections"

// countHanded is the ConnState of the net/http server behind s.
func (s *Server) countHanded(_ net.Conn, st http.ConnState) {
	switch st {
	case http.StateNew:
		s.budget.handed.Add(1)
	case http.StateClosed, http.StateHijacked:
		s.budget.handed.Add(-1)
	}
}

// pacedBody is a body under net/http, which has no limit of its own for slow ones.
type pacedBody struct {
	io.Reader
	rc *http.ResponseController
	pace
}

// Read implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	if d, set := b.next(time.Now()); set {
		_ = b.rc.SetReadDeadline(d)
	}
	n, err := b.Reader.Read(p)
	b.n += int64(n)
	if err == io.EOF {
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}
