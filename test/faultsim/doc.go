// Package faultsim drives whole agents through random faults in virtual time, and looks afterwards whether anything was
// lost, done twice, or left behind.
//
// A seed makes a plan: a fleet of two to four agents with their simulated engines, arrivals of requests, and faults, each
// with its virtual time. The plan is carried out inside a testing/synctest bubble, on connections in memory that can be
// cut, stalled, delayed and left half open. The code under test is the real one, all of agent, proxy, routing and gossip.
// After the run every request, the engines' journals, and what the agents still count are held against the invariants of
// check.go.
//
//	go test ./test/faultsim                     a few seeds
//	go test ./test/faultsim -long               some hundred, and each guard switched off in turn
//	go test ./test/faultsim -seeds 2000         more
//	go test ./test/faultsim -seed 17 -v         one, with its trace
//
// The same seed always makes the same plan: the same faults at the same virtual times. What the goroutines make of it
// differs from run to run where the order of events at one instant is the scheduler's choice.
package faultsim
