// Package demo shows in seconds what grapevine does: simulated engines on loopback, real agents with real Serf and real
// sockets, all in one process, under seeded arrivals at 0.8 of the fleet's measured capacity; then the same arrivals
// against plain round robin over fresh engines, straight and without agents between, which favours round robin.
package demo
