package routing

import (
	"sync/atomic"
	"time"
)

// tick is a moment in nanoseconds on the table's own clock, which starts at the first time it is given. Ticks fit in
// an atomic and compare in one instruction. 0 means never.
type tick int64

// never lies before the start of every clock, so that "never" is always in the past.
const never tick = 0

// start is the tick of the clock's first moment; it leaves room for times that lie before.
const start tick = 1 << 60

type clock struct{ epoch atomic.Pointer[time.Time] }

// tick converts a time; the monotonic reading is used where there is one, so steps of the wall clock do not matter.
func (c *clock) tick(now time.Time) tick {
	e := c.epoch.Load()
	if e == nil {
		first := now // a copy, so that only the first call allocates
		c.epoch.CompareAndSwap(nil, &first)
		e = c.epoch.Load()
	}
	return start + tick(now.Sub(*e))
}

// time converts back; the zero time for never.
func (c *clock) time(at tick) time.Time {
	e := c.epoch.Load()
	if at == never || e == nil {
		return time.Time{}
	}
	return e.Add(time.Duration(at - start))
}
