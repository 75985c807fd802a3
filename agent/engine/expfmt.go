package engine

import (
	"bytes"
	"math"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// scanExpfmt fills the scanner with the understanding that prometheus/common's parser has of a page: the fallback
// behind the scanner, and in tests its twin. It knows the whole text format, but gives up at the first odd line and
// costs far more. What it read before an error is kept.
//
// The content type is not asked: a decoder picked for OpenMetrics fails on vLLM's counters, and vLLM labels its text
// as version 1.0.0 whatever the Accept header says.
func (s *scanner) scanExpfmt(page []byte) error {
	s.reset()
	parser := expfmt.NewTextParser(model.UTF8Validation) // the zero TextParser panics
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	for name, family := range families {
		for _, m := range family.GetMetric() {
			// Labels become text again, so that both ways share everything behind this point.
			var labels []byte
			for _, l := range m.GetLabel() {
				labels = append(labels, '"')
				labels = append(labels, labelEscaper.Replace(l.GetName())...)
				labels = append(labels, `"="`...)
				labels = append(labels, labelEscaper.Replace(l.GetValue())...)
				labels = append(labels, `",`...)
			}
			switch {
			case m.Gauge != nil:
				s.sample([]byte(name), labels, m.GetGauge().GetValue())
			case m.Counter != nil:
				s.sample([]byte(name), labels, m.GetCounter().GetValue())
			case m.Untyped != nil:
				s.sample([]byte(name), labels, m.GetUntyped().GetValue())
			case m.Histogram != nil:
				s.sample([]byte(name+"_count"), labels, float64(m.GetHistogram().GetSampleCount()))
				s.sample([]byte(name+"_sum"), labels, m.GetHistogram().GetSampleSum())
			case m.Summary != nil:
				s.sample([]byte(name+"_count"), labels, float64(m.GetSummary().GetSampleCount()))
				s.sample([]byte(name+"_sum"), labels, m.GetSummary().GetSampleSum())
			}
		}
	}
	return err
}

func (s *scanner) sample(name, labels []byte, value float64) {
	if wants, ok := s.byName[string(name)]; ok {
		s.deliver(wants, labels, value, !math.IsNaN(value) && !math.IsInf(value, 0))
	}
}

var labelEscaper = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
