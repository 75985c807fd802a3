package otlp

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/grapevine-lb/grapevine/proxy/span"
)

// Sampler decides which requests are recorded.
type Sampler struct {
	name   string
	parent bool   // what the request came with decides, if it came with anything
	below  uint64 // of the rest, those whose trace id's last 63 bits are below
}

const all = 1 << 63

// samplerNamed is the sampler of OTEL_TRACES_SAMPLER and its argument. With an error it is the default.
func samplerNamed(name, arg string) (Sampler, error) {
	s := Sampler{name: name, below: all}
	switch name {
	case "", "parentbased_always_on":
		s.name, s.parent = "parentbased_always_on", true
	case "always_on":
	case "always_off":
		s.below = 0
	case "parentbased_always_off":
		s.parent, s.below = true, 0
	case "traceidratio", "parentbased_traceidratio":
		s.parent = name != "traceidratio"
		if arg == "" {
			return s, nil
		}
		f, err := strconv.ParseFloat(arg, 64)
		if err != nil || !(f >= 0 && f <= 1) {
			return s, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG=%q must be a number from 0 to 1; it counts as 1", arg)
		}
		s.below = uint64(f * all)
	default:
		return Sampler{name: "parentbased_always_on", parent: true, below: all},
			fmt.Errorf("OTEL_TRACES_SAMPLER=%q is not known here; parentbased_always_on is in use", name)
	}
	return s, nil
}

// Sample reports whether a request is recorded. parent is the context that it came with; the zero value if it came with none.
// Agents come to the same answer for the same trace.
func (s Sampler) Sample(id span.TraceID, parent span.Context) bool {
	if s.parent && parent.Span != (span.ID{}) {
		return parent.Sampled
	}
	return binary.BigEndian.Uint64(id[8:])>>1 < s.below
}

// String is the sampler's name.
func (s Sampler) String() string { return s.name }
