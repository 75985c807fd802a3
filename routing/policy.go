package routing

import (
	"math/rand/v2"
	"time"
)

// Policy picks a replica for a request. Pick is safe for concurrent use, allocates nothing, and counts nothing: the
// caller calls Peer.Sent for what it really sends. Each goroutine brings its own rnd.
type Policy interface {
	Name() string
	Pick(s *Snapshot, r *Request, now time.Time, rnd *rand.Rand) Decision
}
