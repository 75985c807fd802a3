package routing

import "fmt"

// Outcome is how a request sent to a replica ended, as its entry agent saw it.
type Outcome uint8

// Hard failures are those that hard() lists; the rest is nobody's failure or the client's.
const (
	OutcomeOK          Outcome = iota
	OutcomeRefused             // dial error: it surely did not run
	OutcomeReset               // connection ended before the answer was whole
	OutcomeServerError         // 500, 502, 504, or a 503 that the engine's table marks as dead
	OutcomeBusy                // 429 or any other 503
	OutcomeClientError         // 4xx
	OutcomeCancelled           // the client hung up, or we moved the request
	OutcomeTimeout             // no first byte, or silence, past the limit
	OutcomeMalformed           // not HTTP, or a 200 without content or finish reason
)

var outcomeNames = [...]string{"ok", "refused", "reset", "server_error", "busy", "client_error", "cancelled", "timeout", "malformed"}

// String returns the lower-case name used as a metric label.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Hard reports whether the outcome counts against the replica.
func (o Outcome) Hard() bool {
	switch o {
	case OutcomeRefused, OutcomeReset, OutcomeServerError, OutcomeTimeout, OutcomeMalformed:
		return true
	}
	return false
}
