package routing

import (
	"math"
	"time"
)

// lateFor is how fast an old time to first token fades from the average.
const lateFor = tick(10 * time.Second)

// late takes one time to first token, in seconds, into the peak-sensitive average; the lock is held. A longer one than
// the average counts whole, at once; shorter ones bring it down by age.
func (p *Peer) late(seconds float64, now tick) {
	old := math.Float64frombits(p.latest.Load())
	at := tick(p.lateAt.Load())
	if at == never || seconds > old {
		old = seconds
	} else {
		k := math.Exp(-float64(max(0, now-at)) / float64(lateFor))
		old = old*k + seconds*(1-k)
	}
	p.latest.Store(math.Float64bits(old))
	p.lateAt.Store(int64(now))
}

// Latency returns the peak-sensitive average of the time to first token; unknown before the first.
func (p *Peer) Latency() Opt[time.Duration] {
	if tick(p.lateAt.Load()) == never {
		return Opt[time.Duration]{}
	}
	return Some(time.Duration(math.Float64frombits(p.latest.Load()) * 1e9))
}
