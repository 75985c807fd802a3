// Package sim runs a fleet in virtual time: the product's own routing code at each agent, with simulated engines behind
// it, over a trace of requests. It answers what a policy is worth and how many replicas a load needs, in seconds.
//
// What is the product's own code: the routing tables with their records, own sends, digests and health, the policies, the
// answers to questions, the gate's and the thief's decisions. What is modelled: the engines (agent/engine/enginesim), the
// network (one-way hops, lost records), how the agents' messages interleave, and what an agent learns of its engine's
// speed (as in package proxy). What is left out: CPU time, bodies, HTTP, clients that hang up.
//
//	trace, _ := sim.Workload("chat")
//	res, err := sim.Run(ctx, sim.Config{Trace: trace, Replicas: 16, Load: 0.85, Policy: "auto"})
//
// A run is one goroutine; runs of different Configs share only the Trace, which they read. The same Config gives the
// same Result, to the last digit on one kind of processor.
package sim

// blockTokens is the length of a prefix block in traces, as everywhere in the product.
const blockTokens = 512
