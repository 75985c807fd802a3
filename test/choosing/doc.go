// Package choosing measures how well real agents choose: eight grapevine processes before eight simulated engines, on real
// sockets, against round robin, the power of two choices, and a twin that knows the exact state of all engines.
package choosing
