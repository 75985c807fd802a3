package agent

// Leftovers names every count of requests, claims, tickets and body memory that is not zero. An agent at rest has none;
// it is for tests, and for finding out why a drain does not end. Nil before Listening.
func (a *Agent) Leftovers() []string {
	select {
	case <-a.listening:
		return a.proxy.Leftovers()
	default:
		return nil
	}
}
