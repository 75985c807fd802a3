package sim

import (
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/routing"
)

// stage is where a request is.
type stage uint8

const (
	stagePick     stage = iota // at its entry: to be picked for, or asked about
	stageUnderWay              // sent to its target
	stageHeld                  // at the target's gate
	stageEngine                // at the target's engine
	stageAnswered              // the engine is done, the answer is under way
)

// request is one request from arrival to end. Ended ones are used again.
type request struct {
	slot    int32  // in Sim.live; the engine's name for it
	gen     uint32 // what is under way for an older one is void
	stage   stage
	arrival int64 // ns
	in, out int   // tokens; where it is continued elsewhere, what it had counts as prompt
	blocks  []uint64

	entry, target int32
	req           routing.Request
	tried         [maxAttempts]uint64
	attempts      int
	refusals      int
	asking        *question

	// The attempt under way, as the entry's books have it.
	peer      *routing.Peer
	tokens    int // given to Sent
	predicted time.Duration
	sentAt    int64
	begun     bool // its first token has come
	ticket    bool
	limit     float64 // s, what it may cost at its target before that refuses; 0 = it may not
	refused   bool    // its target refused once
	fixed     bool    // was moved once: stays
	thief     int32
	waiting   bool // was held at all

	// At the target.
	local  int   // uncached prompt tokens
	since  int64 // held since
	flight flight
	handle enginesim.Handle
	hit    int // prompt tokens that the engine had cached
	tokenN int // tokens that the engine made

	firstAt  int64 // at the entry; 0 = not yet
	answered int   // output tokens of earlier attempts
}

// maxAttempts is how often a request is sent before it fails; moves do not count.
const maxAttempts = 4

// question is what one request's questions need.
type question struct {
	decision routing.Decision
	answers  []routing.Answer
	records  [routing.MaxAsk]routing.Report // by the order of the answers
}

// take makes a request, its memory used again where possible.
func (s *Sim) take() *request {
	var r *request
	if n := len(s.pool); n > 0 {
		r = s.pool[n-1]
		s.pool = s.pool[:n-1]
		*r = request{slot: r.slot, gen: r.gen, blocks: r.blocks}
	} else {
		r = &request{slot: int32(len(s.live))}
		s.live = append(s.live, nil)
	}
	s.live[r.slot] = r
	return r
}

// put gives a request back; whatever is under way for it is void.
func (s *Sim) put(r *request) {
	r.gen++
	s.live[r.slot] = nil
	s.release(r)
	s.pool = append(s.pool, r)
	s.ended++
}

// release gives a question's memory back.
func (s *Sim) release(r *request) {
	if r.asking != nil {
		s.questions = append(s.questions, r.asking)
		r.asking = nil
	}
}
