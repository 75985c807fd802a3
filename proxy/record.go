package proxy

import (
	"encoding/base64"
	"sync"
	"time"
)

// recordAge is how old the load record may be that goes with an answer: on a busy link each answer would have one made, and taken
// in at the other end. What refuses a request carries a new one.
const recordAge = time.Millisecond

// ownRecord is our load record as it goes with answers to other agents. It is safe for concurrent use; the zero value is ready.
type ownRecord struct {
	mu   sync.Mutex
	made time.Time
	last string
}

// text returns what record makes, or made a moment ago.
func (r *ownRecord) text(record func() []byte, fresh bool) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); fresh || r.last == "" || now.Sub(r.made) >= recordAge {
		r.made, r.last = now, base64.RawStdEncoding.EncodeToString(record())
	}
	return r.last
}
