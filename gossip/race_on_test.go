//go:build race

package gossip_test

// raceEnabled leaves out what the race detector makes ten times slower without seeing more.
const raceEnabled = true
