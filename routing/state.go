package routing

import "fmt"

// State is where a replica is in its life. The numbers are the wire form.
type State uint8

// The states in the order of a life; see transitions in health.go for who may follow whom.
const (
	StateUnknown  State = iota // no record yet
	StateStarting              // the agent runs, the engine does not answer yet
	StateWarming               // the engine answers, the warm-up request is under way
	StateReady                 // takes requests
	StateAsleep                // the engine sleeps; it takes no requests until it is woken
	StateDraining              // finishes what it has, takes nothing new
	StateSuspect               // its own agent saw hard failures in a row, or its records stopped
	StateEjected               // we put it aside for a time because of what we saw ourselves
	StateGone                  // left, failed or said goodbye
)

var stateNames = [...]string{"unknown", "starting", "warming", "ready", "asleep", "draining", "suspect", "ejected", "gone"}

// String returns the lower-case name used in status and metrics.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// MarshalText writes the name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
