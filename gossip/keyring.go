package gossip

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/memberlist"
)

// maxKeyIDs bounds the tag of key ids.
const maxKeyIDs = 4

// ring is the key ring, which may change while the node runs. Every key decrypts at once. For sending it takes the
// newest key that all alive members announce in their tags, so a key can be rolled out in any order; UseKey overrides.
// Alone it takes the newest, and while nobody answers it tries the others in turn: the cluster may not know ours yet.
type ring struct {
	mu     sync.Mutex
	ml     *memberlist.Keyring
	keys   [][]byte // newest first
	forced string   // id, by UseKey
}

// KeyInfo is one key for status and the keys command.
type KeyInfo struct {
	ID      string `json:"id"`
	Sending bool   `json:"sending"`
	KnownBy int    `json:"known_by"` // alive replicas that can read it, ourselves included
}

// ErrNoKeys says that the node runs without encryption; turning it on or off takes a restart.
var ErrNoKeys = errors.New("gossip runs without a key; encryption cannot be turned on or off in a running agent")

func newRing(keys [][]byte) (*ring, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	ml, err := memberlist.NewKeyring(keys, keys[0])
	if err != nil {
		return nil, fmt.Errorf("key ring: %w", err)
	}
	return &ring{ml: ml, keys: slices.Clone(keys)}, nil
}

// ids is the tag: the keys that we can read, newest first.
func (r *ring) ids() string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for _, k := range r.keys[:min(len(r.keys), maxKeyIDs)] {
		ids = append(ids, KeyID(k))
	}
	return strings.Join(ids, ",")
}

// choose makes the right key the one for sending, and reports whether that changed. known tells whether all alive
// members announce a key; alone keeps what tryNext found.
func (r *ring) choose(known func(id string) bool, alone bool) (id string, changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := KeyID(r.ml.GetPrimaryKey())
	best := r.ml.GetPrimaryKey()
	switch {
	case r.forced != "":
		best = r.byID(r.forced)
	case alone:
		if !containsKey(r.keys, best) {
			best = r.keys[0]
		}
	default:
		for _, k := range r.keys {
			if known(KeyID(k)) {
				best = k
				break
			}
		}
		if !containsKey(r.keys, best) {
			best = r.keys[0] // the key in use was taken away and no other is known to all
		}
	}
	if err := r.ml.UseKey(best); err != nil {
		return was, false
	}
	for _, k := range r.ml.GetKeys() {
		if !containsKey(r.keys, k) {
			_ = r.ml.RemoveKey(k)
		}
	}
	id = KeyID(best)
	return id, id != was
}

func (r *ring) byID(id string) []byte {
	for _, k := range r.keys {
		if KeyID(k) == id {
			return k
		}
	}
	return nil
}

// tryNext makes the next key the one for sending, after a join that nobody answered.
func (r *ring) tryNext() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.forced != "" || len(r.keys) < 2 {
		return
	}
	cur := r.ml.GetPrimaryKey()
	i := slices.IndexFunc(r.keys, func(k []byte) bool { return KeyID(k) == KeyID(cur) })
	_ = r.ml.UseKey(r.keys[(i+1)%len(r.keys)])
}

func (r *ring) set(keys [][]byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range keys {
		if err := r.ml.AddKey(k); err != nil {
			return fmt.Errorf("key %s: %w", KeyID(k), err)
		}
	}
	r.keys = slices.Clone(keys)
	if r.forced != "" && r.byID(r.forced) == nil {
		r.forced = ""
	}
	return nil
}

// SetKeys replaces the key ring, newest first. New keys are read at once and announced; the first is used for sending
// when all alive members announce it. Keys that are not in the list any more are forgotten.
func (n *Node) SetKeys(keys [][]byte) error {
	if n.ring == nil || len(keys) == 0 {
		return ErrNoKeys
	}
	if err := n.ring.set(keys); err != nil {
		return err
	}
	n.tagMu.Lock()
	n.id.keys = n.ring.ids()
	n.tagMu.Unlock()
	n.tagsChanged()
	n.chooseKey()
	return nil
}

// UseKey makes the key with that id the one for sending, whether or not all members can read it.
func (n *Node) UseKey(id string) error {
	if n.ring == nil {
		return ErrNoKeys
	}
	n.ring.mu.Lock()
	ok := n.ring.byID(id) != nil
	if ok {
		n.ring.forced = id
	}
	n.ring.mu.Unlock()
	if !ok {
		return fmt.Errorf("no key with id %s", id)
	}
	n.chooseKey()
	return nil
}

// Keys lists the ring, newest first.
func (n *Node) Keys() []KeyInfo {
	if n.ring == nil {
		return nil
	}
	n.ring.mu.Lock()
	defer n.ring.mu.Unlock()
	primary := KeyID(n.ring.ml.GetPrimaryKey())
	var out []KeyInfo
	for _, k := range n.ring.keys {
		id := KeyID(k)
		out = append(out, KeyInfo{ID: id, Sending: id == primary, KnownBy: 1 + n.book.announce(id)})
	}
	return out
}

// chooseKey is called after changes of the ring and of members.
func (n *Node) chooseKey() {
	if n.ring == nil {
		return
	}
	others := n.Alive() - 1
	known := func(id string) bool { return n.book.announce(id) == others }
	if id, changed := n.ring.choose(known, others == 0); changed {
		n.log.Info("gossip sends with another key", slog.String("key", id))
	}
}

// announce counts the alive other replicas that can read a key.
func (b *book) announce(id string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	count := 0
	for _, e := range b.entries {
		if e.alive && !e.stock && slices.Contains(strings.Split(e.id.keys, ","), id) {
			count++
		}
	}
	return count
}
