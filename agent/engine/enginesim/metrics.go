package enginesim

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// page writes a metrics page in the text format.
type page struct {
	b     []byte
	float bool // whole numbers as 3.0, like prometheus_client for Python
}

func (p *page) head(name, typ, help string) {
	p.b = append(p.b, "# HELP "+name+" "+help+"\n# TYPE "+name+" "+typ+"\n"...)
}

func (p *page) row(name, labels string, v float64) {
	p.b = append(p.b, name...)
	if labels != "" {
		p.b = append(append(append(p.b, '{'), labels...), '}')
	}
	p.b = append(append(append(p.b, ' '), p.number(v)...), '\n')
}

func (p *page) one(name, typ, help, labels string, v float64) {
	p.head(name, typ, help)
	p.row(name, labels, v)
}

func (p *page) number(v float64) string {
	s := strconv.FormatFloat(v, 'g', -1, 64)
	if math.Abs(v) >= 1e6 && math.Abs(v) < 1e15 && v == math.Trunc(v) && !p.float {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	if p.float && !strings.ContainsAny(s, ".eIN") {
		return s + ".0"
	}
	return s
}

func (p *page) histogram(name, help, labels string, h *histogram) {
	p.head(name, "histogram", help)
	sum := uint64(0)
	for i, le := range h.bounds {
		sum += h.counts[i]
		p.row(name+"_bucket", labels+`,le="`+p.number(le)+`"`, float64(sum))
	}
	p.row(name+"_bucket", labels+`,le="+Inf"`, float64(h.count))
	p.row(name+"_count", labels, float64(h.count))
	p.row(name+"_sum", labels, h.sum)
}

// process writes the families that every Python engine has.
func (p *page) process(start time.Time) {
	p.one("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.", "", float64(start.UnixMilli())/1000)
	p.one("process_open_fds", "gauge", "Number of open file descriptors.", "", 37)
}

func bit(v bool) float64 {
	if v {
		return 1
	}
	return 0
}

type histogram struct {
	bounds []float64
	counts []uint64
	count  uint64
	sum    float64
}

func newHistogram(bounds ...float64) histogram {
	return histogram{bounds: bounds, counts: make([]uint64, len(bounds))}
}

func (h *histogram) add(v float64) {
	h.count++
	h.sum += v
	for i, le := range h.bounds {
		if v <= le {
			h.counts[i]++
			return
		}
	}
}

func (h histogram) clone() histogram {
	h.counts = append([]uint64(nil), h.counts...)
	return h
}

// seen is what an engine remembers of the requests it served, beyond the model's counters.
type seen struct {
	ttft, e2e, queue, prompt, output histogram
	finished                         map[string]uint64 // by finish reason
	promptS, outputS                 float64           // seconds spent on prompts and on tokens
	longest                          int               // tokens of the longest sequence
}

func (s *seen) init() {
	seconds := []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	tokens := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
	*s = seen{newHistogram(seconds...), newHistogram(seconds...), newHistogram(seconds...), newHistogram(tokens...), newHistogram(tokens...), map[string]uint64{}, 0, 0, 0}
}

func (s *seen) queued(o *output) { s.queue.add(o.startedAt.Sub(o.submittedAt).Seconds()) }

func (s *seen) first(o *output) {
	s.ttft.add(o.firstAt.Sub(o.submittedAt).Seconds())
	s.promptS += o.firstAt.Sub(o.startedAt).Seconds()
}

func (s *seen) done(o *output, at time.Time) {
	s.e2e.add(at.Sub(o.submittedAt).Seconds())
	s.prompt.add(float64(o.promptTokens))
	s.output.add(float64(o.tokens))
	s.finished[o.stop]++
	if !o.firstAt.IsZero() {
		s.outputS += at.Sub(o.firstAt).Seconds()
	}
	s.longest = max(s.longest, o.promptTokens+o.tokens)
}

// sample is everything a metrics page needs, at one moment.
func (s *Server) sample() (Stats, seen, bool) {
	st := s.Stats()
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.seen
	c.ttft, c.e2e, c.queue, c.prompt, c.output = c.ttft.clone(), c.e2e.clone(), c.queue.clone(), c.prompt.clone(), c.output.clone()
	c.finished = map[string]uint64{}
	for k, v := range s.seen.finished {
		c.finished[k] = v
	}
	return st, c, s.activeLocked("sleep")
}
