// Package guard names the checks that keep a request from running twice, or for nobody. Each is on in every program.
// test/faultsim alone switches one off at a time, to show that it would notice.
package guard

import "sync/atomic"

// Guard is one of the checks.
type Guard uint32

// The guards.
const (
	Claim  Guard = 1 << iota // a victim takes the claim away before it gives a held request to a thief
	Ticket                   // a ticket works once and for its time only
	Replay                   // a request that was cut short is replayed once
	HangUp                   // a client's hang-up ends what runs for it
)

var off atomic.Uint32

// Off reports whether a guard is switched off.
func (g Guard) Off() bool { return Guard(off.Load())&g != 0 }

// SwitchOff switches a guard off until restore is called. It is for tests, one at a time.
func (g Guard) SwitchOff() (restore func()) {
	off.Store(uint32(g))
	return func() { off.Store(0) }
}

// String is the guard's name in test output.
func (g Guard) String() string {
	return map[Guard]string{Claim: "claim removal", Ticket: "ticket", Replay: "single replay", HangUp: "abort on hang-up"}[g]
}
