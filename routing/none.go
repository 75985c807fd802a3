package routing

import "time"

// none returns why nobody can be picked; it runs only then.
func (s *Snapshot) none(g *group, r *Request, now time.Time) Decision {
	if g == nil || len(g.entries) == 0 {
		if s.Unknown(r.Model, now) {
			return Decision{Reason: ReasonUnknownModel}
		}
		return Decision{Reason: ReasonNoModel}
	}
	serves, tried, full := 0, 0, 0
	at := s.table.clock.tick(now)
	for i := range g.entries {
		e := &g.entries[i]
		if r.Service != 0 && e.serves != 0 && e.serves&r.Service == 0 {
			continue
		}
		serves++
		if r.tried(e.peer.boot) {
			tried++
		} else if e.peer.level(e.peer.view.Load(), at, r.class()) == levelRefuses {
			full++
		}
	}
	switch {
	case serves == 0:
		return Decision{Reason: ReasonNoService}
	case full > 0:
		return Decision{Reason: ReasonAllFull}
	case tried > 0:
		return Decision{Reason: ReasonAllTried}
	}
	return Decision{Reason: ReasonNoneUsable}
}
