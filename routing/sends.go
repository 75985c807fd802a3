package routing

// sendRing is how many of our own sends to one peer are remembered with their time. Older ones count as reported:
// 64 sends to one replica within one report's age are far beyond what it takes.
const sendRing = 64

// transit is the longest time that a send may need to be counted by the target; older sends are surely in a record
// taken after it, whatever the target's counter says.
const transit = 500e6 // ns

// sends finds out which of our own sends a record cannot contain yet. The owner's lock guards it.
type sends struct {
	n        int64 // sends so far
	tokens   int64 // their tokens
	ring     [sendRing]send
	included int64 // sends that the newest record contains
	accepted Opt[uint32]
}

type send struct {
	at     tick
	tokens int64 // running sum, this one included
}

func (s *sends) add(at tick, tokens int64) {
	s.tokens += tokens
	s.ring[s.n%sendRing] = send{at, s.tokens}
	s.n++
}

// before returns how many sends left before at.
func (s *sends) before(at tick) int64 {
	i := s.n
	for ; i > 0 && i > s.n-sendRing; i-- {
		if s.ring[(i-1)%sendRing].at <= at {
			break
		}
	}
	return i
}

// report takes a new record and returns how many of our sends, and of their tokens, it cannot contain.
//
// By time it contains what left before the record's sample was taken. The target's counter of accepted requests says
// more: it cannot contain more new sends of ours than it accepted since the record before.
func (s *sends) report(sampled tick, accepted Opt[uint32]) (n, tokens, ours int64, all Opt[int64]) {
	inc := s.before(sampled)
	if accepted.OK && s.accepted.OK {
		all = Some(int64(accepted.V - s.accepted.V))
		inc = max(min(inc, s.included+all.V), s.before(sampled-transit))
	}
	inc = max(inc, s.included)
	ours = inc - s.included
	s.included, s.accepted = inc, accepted
	n, tokens = s.from(inc)
	return n, tokens, ours, all
}

// after returns how many sends left after at, and their tokens.
func (s *sends) after(at tick) (n, tokens int64) { return s.from(s.before(at)) }

// from returns the sends but for the first i, and their tokens; those that are forgotten do not count.
func (s *sends) from(i int64) (n, tokens int64) {
	i = max(i, s.n-sendRing+1)
	if i <= 0 {
		return s.n, s.tokens
	}
	return s.n - i, s.tokens - s.ring[(i-1)%sendRing].tokens
}
