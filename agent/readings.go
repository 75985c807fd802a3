package agent

import (
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine"
	"github.com/grapevine-lb/grapevine/routing"
)

// ReadingStatus is one number that the engine tells about itself: its value, where it came from, or why it is unknown.
type ReadingStatus struct {
	Name   string               `json:"name"`
	Value  routing.Opt[float64] `json:"value"`
	Page   string               `json:"page"`   // "" if the engine has no such number
	Metric string               `json:"metric"` // name of the metric, or JSON pointer
	AgeMS  routing.Opt[int64]   `json:"age_ms"` // of the page that it came from; null if none was read
	Why    string               `json:"why"`    // why it is unknown; "" when known
}

// readingsStatus lists all numbers of a reading, the unknown ones too.
func readingsStatus(rd *engine.Reading, readError string, now time.Time) []ReadingStatus {
	out := []ReadingStatus{}
	for _, f := range rd.Fields() {
		s := ReadingStatus{Name: f.Field.String(), Value: f.Value, Page: f.Page, Metric: f.Metric, Why: f.Why}
		if !f.At.IsZero() {
			s.AgeMS = routing.Some(now.Sub(f.At).Milliseconds())
		}
		if !s.Value.OK && s.Why == "" {
			s.Why = "not read yet"
		}
		if !s.Value.OK && f.Page == "" && readError != "" {
			s.Why = readError
		}
		out = append(out, s)
	}
	return out
}
