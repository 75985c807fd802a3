package proxy

import (
	"slices"
	"time"
)

// hungUp is when requests ended before their answers.
func (s *scripted) hungUp() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ended)
}
