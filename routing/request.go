package routing

import "time"

// PrefixBlockTokens is how many prompt tokens one entry of Request.Prefix stands for, unless Request.Ends says.
const PrefixBlockTokens = 512

// FineBlock in a hash of Request.Prefix marks a block that digests do not carry: only the books of the agent whose engine
// computed it have it, and so the answers to questions.
const FineBlock uint64 = 1 << 63

// Request is what a pick needs to know; the proxy's peek fills it. A pick never changes or keeps it.
type Request struct {
	Model        string  // as the client wrote it, aliases included; "" = any
	Service      Service // one bit, or 0 = do not filter
	PromptTokens int     // estimate; 0 = unknown
	MaxTokens    int     // asked for; 0 = unknown

	// Prefix holds salted, chained hashes of the prompt's growing prefixes, first block first: 32 bits as they travel, and
	// perhaps FineBlock.
	Prefix []uint64
	// Ends are the prompt tokens up to the end of each block; nil = 512 in each.
	Ends []uint32
	// Session is a salted hash of the session key; 0 = none. It stands in for Prefix where that is empty.
	Session uint64
	Class   uint8 // 1 highest … 4; 0 counts as 2

	Tried    []uint64  // boot ids that must not be picked again
	Full     bool      // one of them has refused it because it is full
	Deadline time.Time // the client's own; zero = none

	// Local forbids other replicas (a request that came over a hop, GRAPEVINE_POLICY=local).
	Local bool
}

// Cached returns how many prompt tokens need not be computed where that many leading blocks are cached. The last token always
// is.
func (r *Request) Cached(blocks int) int {
	c := blocks * PrefixBlockTokens
	if blocks > 0 && blocks <= len(r.Ends) {
		c = int(r.Ends[blocks-1])
	}
	return max(0, min(c, r.PromptTokens-1))
}

// firstTokens returns the hash of the prefix that ends nearest below PrefixBlockTokens, or of the first one; there must be one.
func (r *Request) firstTokens() uint64 {
	i := 1
	for i < len(r.Ends) && r.Ends[i] <= PrefixBlockTokens {
		i++
	}
	return r.Prefix[i-1]
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
