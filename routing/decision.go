package routing

// MaxAsk is the most replicas that one decision asks: a fleet of up to 16 is asked whole.
const MaxAsk = 16

// Decision is the result of a pick. The zero value means that nothing can be picked.
type Decision struct {
	Peer          *Peer   // nil: none usable, Reason says why
	Score         float64 // seconds; what Peer was predicted to cost
	Reason        Reason
	RunnerUp      *Peer   // second best; nil = there was none
	RunnerUpScore float64 // seconds

	// Asks is how many replicas should be asked for their exact score before Settle; 0 = send at once.
	Asks int
	// Ask lists them, best first by what gossip says. Our own replica may be among them: it answers without a message.
	Ask [MaxAsk]*Peer
	// AskScore is what gossip said, in seconds, by the same index.
	AskScore [MaxAsk]float64
	// Reused is how many prompt tokens each is believed to have cached, by the same index.
	Reused [MaxAsk]int
}

// Answer is what an asked replica said.
type Answer struct {
	Index int     // index in Decision.Ask
	Score float64 // seconds, exact, without the round trip
	OK    bool    // false: it refuses (draining, full); no answer at all = not in the list
}

// Asked returns the replicas to ask.
func (d *Decision) Asked() []*Peer { return d.Ask[:d.Asks] }
