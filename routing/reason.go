package routing

import "fmt"

// Reason says why a decision came out as it did.
type Reason uint8

// The reasons, bounded in number: they are metric labels and go into x-grapevine-reason.
const (
	ReasonNone         Reason = iota
	ReasonSelf                // our own replica is best, or within 5 ms of the best
	ReasonBest                // lowest score among the candidates
	ReasonPrefix              // lowest score, and it holds the prefix
	ReasonOnly                // nothing else was usable
	ReasonAsked               // lowest exact score among the answers
	ReasonTurn                // its turn in a rotation
	ReasonRandom              // drawn
	ReasonHash                // owner of the key on the ring
	ReasonPanic               // too few usable: softly excluded replicas were let in
	ReasonUnknownModel        // no replica has had the model for ten minutes, and all lists are known: 404
	ReasonNoModel             // the model is known, or may be, but no usable replica has it now: 503
	ReasonNoService           // no replica of the model serves this path
	ReasonTooLong             // kept for the number: a prompt too long for all goes to an engine, which says so itself
	ReasonAllFull             // replicas exist, but all are full or refuse this class: 429
	ReasonAllTried            // every usable replica was tried
	ReasonNoneUsable          // all are draining, down, ejected or gone: 503
	ReasonMoved               // an idle agent pulled it while it was held
	ReasonOwner               // it made the object that the request names
	ReasonShadow              // shadow mode keeps everything here
	ReasonGateway             // a trusted gateway named it
)

var reasonNames = [...]string{"none", "self", "best", "prefix", "only", "asked", "turn", "random", "hash", "panic",
	"unknown_model", "no_model", "no_service", "too_long", "all_full", "all_tried", "none_usable", "moved", "owner", "shadow", "gateway"}

// String returns the lower-case name used as a metric label and in x-grapevine-reason.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// MarshalText writes the name.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what MarshalText wrote, for those who read an agent's JSON. A word of a newer agent is an error.
func (r *Reason) UnmarshalText(b []byte) error {
	for i, name := range reasonNames {
		if name == string(b) {
			*r = Reason(i)
			return nil
		}
	}
	return fmt.Errorf("unknown reason %q", b)
}
