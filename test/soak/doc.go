// Package soak runs a small fleet for minutes under all kinds of traffic and looks for what grows: goroutines, descriptors, heap.
//
//	go test ./test/soak -for 1m -v          as in CI
//	go test ./test/soak -long -v            ten minutes
//
// Engines are simulated at fifty times their speed, so that a minute here is most of an hour of requests. Traffic comes in
// rounds; between two of them the fleet is idle, and then it must be what it was.
package soak
