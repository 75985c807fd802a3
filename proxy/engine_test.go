package proxy

import (
	"slices"
	"testing/synctest"
	"time"
)

// lastPick is the first agent's record of its last request.
func (f *fleet) lastPick() PickRecord {
	synctest.Wait()
	return f.agents[0].Picks("")[0]
}

// hungUp is when requests ended before their answers.
func (s *scripted) hungUp() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ended)
}
