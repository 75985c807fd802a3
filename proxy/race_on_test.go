//go:build race

package proxy

// raceOn tells tests of allocations that pools forget at random.
const raceOn = true
