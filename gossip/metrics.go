package gossip

import (
	"maps"
	"strings"
	"sync"

	"github.com/hashicorp/go-metrics"
)

// Sink keeps the few numbers of Serf and memberlist that tell an operator something: health score, queues, messages,
// member changes. The library's metrics are global to the process and go nowhere by default; a program that wants them
// calls InstallSink once. Values of several nodes in one process are told apart by the label node.
type Sink struct {
	mu sync.Mutex
	v  map[string]float64
}

// keptMetrics are the prefixes that are kept.
var keptMetrics = []string{"memberlist.health.score", "memberlist.queue.", "memberlist.msg.", "serf.queue.", "serf.member."}

// InstallSink makes a new Sink the process-wide destination of the library's metrics. An application that has its own
// go-metrics set-up leaves this out.
func InstallSink() (*Sink, error) {
	s := &Sink{v: make(map[string]float64)}
	// No runtime metrics (they read memory statistics every second), no host name.
	_, err := metrics.NewGlobal(&metrics.Config{FilterDefault: true}, s)
	return s, err
}

// Values returns a copy: gauges and samples with their last value, counters with their sum. Keys are
// "memberlist.msg.alive" or, for a labelled value, "memberlist.msg.alive;node".
func (s *Sink) Values() map[string]float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.v)
}

func (s *Sink) put(key []string, val float32, labels []metrics.Label, add bool) {
	k := strings.Join(key, ".")
	keep := false
	for _, p := range keptMetrics {
		keep = keep || strings.HasPrefix(k, p)
	}
	if !keep {
		return
	}
	for _, l := range labels {
		if l.Name == nodeLabel {
			k += ";" + l.Value
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if add {
		s.v[k] += float64(val)
	} else {
		s.v[k] = float64(val)
	}
}

// nodeLabel tells the nodes of one process apart.
const nodeLabel = "node"

// SetGauge keeps the last value.
func (s *Sink) SetGauge(key []string, val float32) { s.put(key, val, nil, false) }

// SetGaugeWithLabels keeps the last value.
func (s *Sink) SetGaugeWithLabels(key []string, val float32, labels []metrics.Label) {
	s.put(key, val, labels, false)
}

// EmitKey is not used by Serf.
func (s *Sink) EmitKey([]string, float32) {}

// IncrCounter adds.
func (s *Sink) IncrCounter(key []string, val float32) { s.put(key, val, nil, true) }

// IncrCounterWithLabels adds.
func (s *Sink) IncrCounterWithLabels(key []string, val float32, labels []metrics.Label) {
	s.put(key, val, labels, true)
}

// AddSample keeps the last value: the kept samples are queue depths.
func (s *Sink) AddSample(key []string, val float32) { s.put(key, val, nil, false) }

// AddSampleWithLabels keeps the last value.
func (s *Sink) AddSampleWithLabels(key []string, val float32, labels []metrics.Label) {
	s.put(key, val, labels, false)
}
