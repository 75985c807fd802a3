package routing

import (
	"maps"
	"slices"
	"time"
)

// Snapshot is an immutable picture of the members and their models. The numbers inside each Peer go on moving.
type Snapshot struct {
	table      *Table
	self       *Peer
	peers      []*Peer // by boot id
	byBoot     map[uint64]*Peer
	all        *group            // every member, for requests without a model
	models     map[string]*group // by name, aliases included
	lost       map[string]time.Time
	listsKnown bool // every alive member's list is known
}

// Peers returns all alive members, ourselves included, ordered by boot id. Callers must not change the slice.
func (s *Snapshot) Peers() []*Peer { return s.peers }

// Self returns our own replica.
func (s *Snapshot) Self() *Peer { return s.self }

// Models returns the names that some alive member lists, aliases included, sorted.
func (s *Snapshot) Models() []string { return slices.Sorted(maps.Keys(s.models)) }

// Unknown reports whether a model name may be refused for good (404): the lists of all alive members are known and
// none has had the name for ten minutes. Otherwise the honest answer is "not now" (503).
func (s *Snapshot) Unknown(model string, now time.Time) bool {
	if model == "" || s.models[model] != nil || !s.listsKnown {
		return false
	}
	at, ok := s.lost[model]
	return !ok || now.Sub(at) > forgetModel
}

// lone reports whether nearly all of the fleet's requests come through us.
func (s *Snapshot) lone() bool { return s.table.Share() >= loneShare }

// group returns the group of that name, made if need be.
func (s *Snapshot) group(name string) *group {
	g := s.models[name]
	if g == nil {
		g = &group{self: -1}
		s.models[name] = g
	}
	return g
}
