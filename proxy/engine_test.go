package proxy

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// lastPick is the first agent's record of its last request.
func (f *fleet) lastPick() PickRecord {
	synctest.Wait()
	return f.agents[0].Picks("")[0]
}

// sameBytes compares documents as bytes, white space and order included: that is what is promised.
func sameBytes(t *testing.T, want, got string) {
	t.Helper()
	if want != got {
		t.Errorf("want %s\ngot  %s", want, got)
	}
}

// hungUp is when requests ended before their answers.
func (s *scripted) hungUp() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ended)
}
