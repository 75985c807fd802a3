// Package agent is grapevine's composition root and its public library: it puts the parts (gossip, routing, proxy, engine
// reader, GPU reader) together into the program that runs beside one inference replica.
//
//	cfg, err := agent.ConfigFromEnv(os.Environ())
//	a, err := agent.New(cfg, agent.Options{Logger: log}) // checks and builds, starts nothing
//	err = a.Run(ctx)                                     // owns everything until ctx ends; nil after a clean drain
//
// Run opens the listeners, looks for a GPU, joins the members, waits for the engine, sends one warm-up request, tells the
// others and is then ready. When ctx ends it drains: it says so to the others, refuses readiness, goes on answering until
// its streams have ended or DrainTimeout is over, leaves and closes. What Run opened is closed when Run returns.
//
// # Concurrency
//
// Every goroutine belongs to one Run and has ended when it returns. All state hangs off the Agent, so several agents live
// in one process. Methods of Agent may be called from any goroutine, before, during and after Run.
package agent
