package enginesim

import "time"

// Capacity is the throughput of a replica that is never out of work, in jobs per second of virtual time: it is given all
// jobs at once, with its own prefix cache, and timed from the first tenth of the ends to the last that still has others
// waiting behind it, so that neither the filling nor the emptying of the batch counts. Some hundred jobs with the lengths
// of the traffic in question give a figure good to a few per cent; fewer than ten give jobs over time. Jobs that the
// replica refuses are left out; 0 means that nothing could be measured.
func Capacity(p Params, jobs []Job) float64 {
	p.MaxQueued = 0
	e := New(p)
	for i, j := range jobs {
		j.ID, j.Stream = uint64(i), false
		_, _ = e.Submit(0, j) // too long for this replica
	}
	var ends []time.Duration
	full := 0 // ends while others waited
	for at, ok := e.NextEvent(); ok; at, ok = e.NextEvent() {
		for _, ev := range e.Advance(at) {
			if ev.Kind == Done {
				ends = append(ends, ev.At)
				if e.Load().Waiting > 0 {
					full = len(ends)
				}
			}
		}
	}
	first, last := len(ends)/10, full-1
	if last-first < 10 {
		first, last = -1, len(ends)-1
	}
	from := time.Duration(0)
	if first >= 0 {
		from = ends[first]
	}
	if last < 0 || ends[last] == from {
		return 0
	}
	return float64(last-first) / (ends[last] - from).Seconds()
}
