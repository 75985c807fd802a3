package routing

// MaxAsk is the most replicas that one decision asks: a fleet of up to 16 is asked whole.
const MaxAsk = 16

// AskVersion is the lowest protocol version (tag v) of peers that can be asked.
const AskVersion = 1

// Decision is the result of a pick. The zero value means that nothing can be picked.
type Decision struct {
	Peer          *Peer   // nil: none usable, Reason says why
	Score         float64 // seconds; what Peer was predicted to cost
	First         float64 // seconds; when Peer's first token was to come, without what only speaks against it: for Observe
	Tokens        int     // prompt tokens that it must compute: what Sent is to be given
	Reason        Reason
	RunnerUp      *Peer   // second best; nil = there was none
	RunnerUpScore float64 // seconds

	// Asks is how many replicas should be asked for their exact score before Settle; 0 = send at once.
	Asks int
	// Ask lists them, best first by what gossip says. Our own replica may be among them: it answers without a message.
	Ask [MaxAsk]*Peer
	// AskScore is what gossip said, in seconds, by the same index.
	AskScore [MaxAsk]float64
	// AskTokens is how many prompt tokens each must compute by what is known, by the same index.
	AskTokens [MaxAsk]int
	// What only the asker knows, by the same index: the factor for slow start and slowness, and the seconds to add for
	// the round trip and for failures.
	askFactor, askExtra [MaxAsk]float64
	askFirst            [MaxAsk]float64 // First, by what gossip said
	drawn               uint32          // bit i: Ask[i] may be chosen for its load alone, see settle.go
	at                  tick            // of the pick
	table               *Table
}

// Answer is what an asked replica said.
type Answer struct {
	Index  int     // index in Decision.Ask
	Score  float64 // seconds, exact: what Table.Answer returned there
	First  float64 // seconds; when its first token would come
	Tokens int     // prompt tokens that it must compute, by its own digest
	OK     bool    // false: it refuses (draining, full). Who did not answer in time is not in the list at all
}

// Asked returns the replicas to ask.
func (d *Decision) Asked() []*Peer { return d.Ask[:d.Asks] }
