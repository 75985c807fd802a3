package engine

// Field names one number of a [Reading]. Its text form is the name in status and in custom mappings.
type Field uint8

const (
	FieldRunning          Field = iota // requests being computed now
	FieldWaiting                       // requests in the engine's own queue
	FieldRunLimit                      // most requests it runs at once
	FieldWaitingTokens                 // prompt tokens in its queue that no cache covers
	FieldKVUsed                        // share of the KV cache in use, 0..1
	FieldKVCapacity                    // tokens that the KV cache holds
	FieldAsleep                        // weights or cache released until it is woken, 0 or 1
	FieldPrefixHits                    // counter: prompt tokens found in the prefix cache
	FieldPrefixQueries                 // counter: prompt tokens looked up there
	FieldPrefixHitRate                 // share 0..1, where the engine has only this
	FieldPromptTokens                  // counter: prompt tokens processed
	FieldGenerationTokens              // counter: tokens generated
	FieldPreemptions                   // counter: requests thrown back into the queue
	FieldFirstTokens                   // counter: requests that have had their first token
	FieldProcessStart                  // Unix time of the process start, in seconds
	FieldModelsLoaded                  // models in memory, for engines that load them on demand
	numFields
)

// kind says what values a field may take and how they are rounded.
type fieldKind uint8

const (
	kindCount   fieldKind = iota // whole number >= 0
	kindShare                    // 0..1
	kindCounter                  // >= 0, grows, may start again from 0
	kindFlag                     // 0 or 1
)

var fields = [numFields]struct {
	name string
	kind fieldKind
	fold Fold // how a custom mapping folds several series unless it says otherwise
}{
	FieldRunning:          {"running", kindCount, Sum},
	FieldWaiting:          {"waiting", kindCount, Sum},
	FieldRunLimit:         {"run_limit", kindCount, Sum},
	FieldWaitingTokens:    {"waiting_tokens", kindCount, Sum},
	FieldKVUsed:           {"kv_usage", kindShare, Mean},
	FieldKVCapacity:       {"kv_capacity_tokens", kindCount, Sum},
	FieldAsleep:           {"asleep", kindFlag, Max},
	FieldPrefixHits:       {"prefix_hits", kindCounter, Sum},
	FieldPrefixQueries:    {"prefix_queries", kindCounter, Sum},
	FieldPrefixHitRate:    {"prefix_hit_rate", kindShare, Mean},
	FieldPromptTokens:     {"prompt_tokens", kindCounter, Sum},
	FieldGenerationTokens: {"generation_tokens", kindCounter, Sum},
	FieldPreemptions:      {"preemptions", kindCounter, Sum},
	FieldFirstTokens:      {"first_tokens", kindCounter, Sum},
	FieldProcessStart:     {"process_start", kindCounter, Max},
	FieldModelsLoaded:     {"models_loaded", kindCount, Sum},
}

// String returns the field's name in status and in mappings.
func (f Field) String() string {
	if f < numFields {
		return fields[f].name
	}
	return "unknown field"
}

// maxCount is beyond any queue and any KV cache; a larger count is a broken page, not a load.
const maxCount = 1 << 40

// accept checks a folded value against the field's range. Values a rounding error beyond a share's range are
// clamped; everything further out is refused, since a share of 42 would be a percentage that nobody asked for.
func (f Field) accept(v float64) (float64, bool) {
	if v != v || v < 0 && fields[f].kind != kindShare {
		return 0, false
	}
	switch fields[f].kind {
	case kindShare:
		if v < -0.01 || v > 1.05 {
			return 0, false
		}
		return min(max(v, 0), 1), true
	case kindFlag:
		if v > 0 {
			return 1, true
		}
		return 0, true
	case kindCount:
		return v, v <= maxCount
	default:
		return v, v <= 1e300
	}
}
