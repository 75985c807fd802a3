//go:build race

package proxy

// raceEnabled tells tests of allocations that pools forget at random.
const raceEnabled = true
