package engine

import (
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Reading is what the engine said about itself. Every field may be unknown; [Reading.Fields] tells why.
type Reading struct {
	At time.Time // receipt of the page that carries the load; zero if none was ever read

	Running, Waiting, RunLimit routing.Opt[int] // requests; Infinity counts inputs
	WaitingTokens              routing.Opt[int] // uncached prompt tokens in the engine's queue
	KVUsed                     routing.Opt[float64]
	KVCapacity                 routing.Opt[int] // tokens
	Asleep                     routing.Opt[bool]

	// Counters since the engine started: see [Increase] for differences across a restart.
	PrefixHits, PrefixQueries, PromptTokens, GenerationTokens, Preemptions, FirstTokens routing.Opt[float64]

	PrefixHitRate routing.Opt[float64] // 0..1, of engines that have no counters
	ProcessStart  routing.Opt[float64] // Unix seconds
	ModelsLoaded  routing.Opt[int]
	Adapters      Adapters

	Stale    bool          // the last attempt failed: the values are those of At
	TimedOut bool          // it failed by time: the engine is loaded, not down
	Resets   int           // restarts of the engine seen since this Reader was made
	Took     time.Duration // time that fetching and reading took

	sources [numFields]source
}

// Adapters are the LoRA adapters that the engine names in its metrics, each list sorted.
type Adapters struct {
	Known            bool
	Running, Waiting []string
	Max              routing.Opt[int]
}

// source is where a value came from; rendered only for status.
type source struct {
	page, metric string
	at           time.Time
	why          reason
	detail       string
	hint         bool // detail tells the operator what to do
	value        float64
	ok           bool
}

// reason says why a value is unknown.
type reason uint8

const (
	whyKnown reason = iota
	whyNoEntry
	whyNotRead
	whyAbsent
	whyNotFinite
	whyRange
	whyZeroDivisor
	whyStale
	whyPage // detail has the page's error
)

func (s source) text() string {
	switch s.why {
	case whyKnown:
		return ""
	case whyNoEntry:
		return "this engine has no such number"
	case whyNotRead:
		return "not read yet"
	case whyAbsent:
		return "not on the page"
	case whyNotFinite:
		return "not a finite number"
	case whyRange:
		return "out of range"
	case whyZeroDivisor:
		return "divided by zero"
	case whyStale:
		return "older than " + staleAfter.String()
	default:
		return s.detail
	}
}

// FieldStatus is one line of the status page.
type FieldStatus struct {
	Field  Field
	Value  routing.Opt[float64]
	Page   string // path of the page, "" if the engine has no source
	Metric string // metric name or JSON pointer
	At     time.Time
	Why    string // reason if unknown, else ""
}

// Fields lists every field with value, source and, if unknown, the reason.
func (r *Reading) Fields() []FieldStatus {
	out := make([]FieldStatus, numFields)
	for f := range numFields {
		out[f] = r.Field(f)
	}
	return out
}

// Field returns one line of [Reading.Fields].
func (r *Reading) Field(f Field) FieldStatus {
	s := r.sources[f]
	if s.why == whyKnown && !s.ok { // the zero Reading
		s.why = whyNotRead
	}
	return FieldStatus{
		Field: f, Value: routing.Opt[float64]{V: s.value, OK: s.ok},
		Page: s.page, Metric: s.metric, At: s.at, Why: s.text(),
	}
}

// set stores a field's value; count fields are rounded to whole numbers.
func (r *Reading) set(f Field, s source) {
	r.sources[f] = s
	n := routing.Opt[int]{V: int(s.value + 0.5), OK: s.ok}
	v := routing.Opt[float64]{V: s.value, OK: s.ok}
	if !s.ok {
		n, v = routing.Opt[int]{}, routing.Opt[float64]{}
	}
	switch f {
	case FieldRunning:
		r.Running = n
	case FieldWaiting:
		r.Waiting = n
	case FieldRunLimit:
		r.RunLimit = n
	case FieldWaitingTokens:
		r.WaitingTokens = n
	case FieldKVUsed:
		r.KVUsed = v
	case FieldKVCapacity:
		r.KVCapacity = n
	case FieldAsleep:
		r.Asleep = routing.Opt[bool]{V: s.ok && s.value > 0, OK: s.ok}
	case FieldPrefixHits:
		r.PrefixHits = v
	case FieldPrefixQueries:
		r.PrefixQueries = v
	case FieldPrefixHitRate:
		r.PrefixHitRate = v
	case FieldPromptTokens:
		r.PromptTokens = v
	case FieldGenerationTokens:
		r.GenerationTokens = v
	case FieldPreemptions:
		r.Preemptions = v
	case FieldFirstTokens:
		r.FirstTokens = v
	case FieldProcessStart:
		r.ProcessStart = v
	case FieldModelsLoaded:
		r.ModelsLoaded = n
	}
}

// known tells whether anything at all could be read.
func (r *Reading) known() bool {
	for f := range numFields {
		if r.sources[f].ok && f != FieldProcessStart {
			return true
		}
	}
	return r.Adapters.Known
}

// Interval is how long to wait before the next Read: 200 ms while the engine works, 1 s while it idles, and never so
// often that reading takes more than 2 % of the time. vLLM answers its page from the process that also runs its
// token loop, 9.5 ms for 54 KB.
func (r *Reading) Interval() time.Duration {
	d := time.Second
	if r.Running.V > 0 || r.Waiting.V > 0 {
		d = 200 * time.Millisecond
	}
	return min(max(d, 50*r.Took), 2*time.Second)
}
