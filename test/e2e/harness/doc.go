// Package harness runs grapevine the way operators do: as processes with real sockets.
//
// A [Stage] belongs to one test. It owns a /24 of loopback addresses of its own (127.x.y.0), so that every agent and every
// engine of every test can use the same port numbers and no two tests, nor two test binaries, can meet. Everything a stage
// starts is ended by process id when the test ends, and dies with the test binary if that is killed (Linux).
//
//	s := harness.New(t)
//	e := s.FakeEngine(1)
//	a := s.Agent(1, e.URL)
//	a.WaitReady(5 * time.Second)
//
// Logs of processes lie in t.ArtifactDir (kept with `go test -artifacts`); when a test fails, their last lines are printed.
//
// Between an agent and its engine a [Tap] may sit: a relay that records what passed, byte for byte. [Load] is a client that
// knows when an answer is whole; [Official] runs the openai packages for Python and Node.
package harness
