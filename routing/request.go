package routing

import "time"

// PrefixBlockTokens is how many prompt tokens one entry of Request.Prefix stands for.
const PrefixBlockTokens = 512

// Request is what a pick needs to know; the proxy's peek fills it. A pick never changes or keeps it.
type Request struct {
	Model        string  // as the client wrote it, aliases included; "" = any
	Service      Service // one bit, or 0 = do not filter
	PromptTokens int     // estimate; 0 = unknown
	MaxTokens    int     // asked for; 0 = unknown

	// Prefix holds salted, chained hashes of the prompt's growing 512-token prefixes, first block first.
	Prefix []uint64
	// Session is a salted hash of the session key; 0 = none. It stands in for Prefix where that is empty.
	Session uint64
	Class   uint8 // 1 highest … 4; 0 counts as 2

	Tried    []uint64  // boot ids that must not be picked again
	Full     bool      // one of them has refused it because it is full
	Deadline time.Time // the client's own; zero = none

	// Local forbids other replicas (a request that came over a hop, GRAPEVINE_POLICY=local).
	Local bool
}

// class returns the class with the default filled in.
func (r *Request) class() uint8 {
	if r.Class == 0 {
		return 2
	}
	return r.Class
}

// tried reports whether boot must not be picked again.
func (r *Request) tried(boot uint64) bool {
	for _, b := range r.Tried {
		if b == boot {
			return true
		}
	}
	return false
}
