package routing

import "time"

// Refusing reports whether every replica that takes requests at all says that it refuses this class now, and how long the
// least loaded of them needs for the prompts that it has; it looks at all members, whatever their models.
func (s *Snapshot) Refusing(class uint8, now time.Time) (drain time.Duration, all bool) {
	at := s.table.clock.tick(now)
	for _, p := range s.peers {
		v := p.view.Load()
		l := p.level(v, at, class)
		switch {
		case l < levelRefuses && l != levelKept:
			return 0, false
		case l != levelRefuses:
			continue
		}
		rate := v.base.rate
		if rate <= 0 {
			rate = s.table.Rate()
		}
		d := time.Duration(v.base.queue / rate * float64(time.Second))
		if !all || d < drain {
			drain, all = d, true
		}
	}
	return drain, all
}
