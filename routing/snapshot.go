package routing

// Snapshot is an immutable picture of the members and their models. The numbers inside each Peer go on moving.
type Snapshot struct {
	self  *Peer
	peers []*Peer
}

// Peers returns all alive members, ourselves included, ordered by boot id. Callers must not change the slice.
func (s *Snapshot) Peers() []*Peer { return s.peers }

// Self returns our own replica.
func (s *Snapshot) Self() *Peer { return s.self }
