package agent

import (
	"sort"
	"sync/atomic"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// durationBounds are the upper bounds of the histogram buckets, in seconds: from a warm small model to a long queue.
var durationBounds = [...]float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

// durations is a histogram of times. Observe is for the request path: no lock, no allocation. The zero value is empty.
type durations struct {
	counts [len(durationBounds) + 1]atomic.Uint64
	sum    atomic.Int64 // ns
}

// Observe counts one time; a negative one counts as zero.
func (h *durations) Observe(d time.Duration) {
	d = max(d, 0)
	h.counts[sort.SearchFloat64s(durationBounds[:], d.Seconds())].Add(1)
	h.sum.Add(int64(d))
}

func (h *durations) histogram() *dto.Histogram {
	out := &dto.Histogram{SampleSum: new(time.Duration(h.sum.Load()).Seconds())}
	var n uint64
	for i, b := range durationBounds {
		n += h.counts[i].Load()
		out.Bucket = append(out.Bucket, &dto.Bucket{UpperBound: new(b), CumulativeCount: new(n)})
	}
	n += h.counts[len(durationBounds)].Load()
	out.SampleCount = new(n)
	return out
}
