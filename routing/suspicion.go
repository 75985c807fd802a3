package routing

import "time"

// Suspicion counts a replica's own engine's hard failures over all entries, for its agent: three in a row make it
// suspect until a request succeeds or ten seconds have passed. The zero value is ready; the caller locks.
type Suspicion struct {
	streak int
	until  time.Time
}

// Note takes one outcome at the own engine and reports whether it is suspect now.
func (s *Suspicion) Note(o Outcome, now time.Time) bool {
	switch {
	case o == OutcomeOK:
		s.streak, s.until = 0, time.Time{}
	case o.Hard():
		if s.streak++; s.streak >= hardInRow {
			s.until = now.Add(time.Duration(failFor))
		}
	}
	return s.Suspect(now)
}

// Suspect reports whether the engine is suspect at now.
func (s *Suspicion) Suspect(now time.Time) bool { return now.Before(s.until) }
