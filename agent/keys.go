package agent

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/gossip"
)

// What keys mean is package gossip's (who sends with which) and package peertls's (who may connect). Here a changed ring
// reaches both: from the key file, which is read again when it changes, or from the keys command.

const (
	keysEvery = 2 * time.Second  // between two looks at the file
	leftGrace = 10 * time.Second // for the last streams of a member that left
	maxKeys   = 12               // in a ring; so many fit into a handshake between agents
)

// keyRing is the ring in use, and what is remembered for the loop that watches it.
type keyRing struct {
	mu    sync.Mutex
	keys  [][]byte
	seen  [sha256.Size]byte    // hash of the file's content that was read last
	left  map[uint64]time.Time // members that left, whose connections still stand
	first bool
}

// watchKeys reads the key file again when it changes, and closes what members that left have not closed, until ctx ends.
func (a *Agent) watchKeys(ctx context.Context) error {
	tick := time.NewTicker(keysEvery)
	defer tick.Stop()
	for {
		a.rereadKeys()
		a.dropLeft(time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (a *Agent) rereadKeys() {
	if a.cfg.GossipKeyFile == "" || len(a.keys) == 0 {
		return
	}
	b, err := os.ReadFile(a.cfg.GossipKeyFile)
	sum := sha256.Sum256(b)
	a.ring.mu.Lock()
	same, first := err == nil && sum == a.ring.seen, !a.ring.first
	a.ring.first = true
	if err == nil {
		a.ring.seen = sum
	}
	a.ring.mu.Unlock()
	if same {
		return
	}
	var keys [][]byte
	if err == nil {
		keys, err = splitKeys(string(b)) // its errors hold no key
	}
	if err == nil && len(keys) == 0 {
		err = errors.New("it holds no key")
	}
	if err == nil && first && slices.EqualFunc(keys, a.keys, bytes.Equal) {
		return // what the configuration was read with
	}
	if err == nil {
		err = a.setKeys(keys)
	}
	if err != nil {
		if a.warn("keys", MsgKeyFile) {
			a.log.Warn(MsgKeyFile, "file", a.cfg.GossipKeyFile, KeyErr, err, KeyHint, "the keys that were read before stay in use")
		}
		return
	}
	a.clear("keys")
}

// setKeys puts another ring in use, newest key first: gossip announces it, the links between agents take it, and
// connections under a key that is gone end.
func (a *Agent) setKeys(keys [][]byte) error {
	if len(keys) > maxKeys {
		return fmt.Errorf("%d keys, at most %d", len(keys), maxKeys)
	}
	if err := a.node.SetKeys(keys); err != nil {
		return err
	}
	if a.tls != nil {
		if err := a.tls.SetKeys(keys); err != nil {
			return err
		}
	}
	a.ring.mu.Lock()
	a.ring.keys = keys
	a.ring.mu.Unlock()
	if a.salt.Set(saltKey(keys)) {
		a.digests.own.Clear()
	}
	var ids []string
	for _, k := range keys {
		ids = append(ids, gossip.KeyID(k))
	}
	a.log.Info(MsgKeys, "keys", strings.Join(ids, ","))
	return nil
}

// saltKey is the key of a ring that the hashes of prompt prefixes are salted with: the oldest, which all agents have while a
// newer one is being spread, those that start meanwhile too. When it is removed, at all within seconds, what the digests hold
// says nothing any more, and the next prompts fill them anew.
func saltKey(keys [][]byte) []byte {
	if len(keys) == 0 {
		return nil
	}
	return keys[len(keys)-1]
}

// present is the ring in use.
func (a *Agent) present() [][]byte {
	a.ring.mu.Lock()
	defer a.ring.mu.Unlock()
	if a.ring.keys == nil {
		return slices.Clone(a.keys)
	}
	return slices.Clone(a.ring.keys)
}

// changeKeys does what the keys command says: install (arg is the key in base64, which becomes the newest), use or remove
// (arg is an id). It concerns this agent alone (changeAllKeys: all), until its key file changes or it ends.
func (a *Agent) changeKeys(verb, arg string) error {
	if len(a.keys) == 0 {
		return gossip.ErrNoKeys
	}
	ring := a.present()
	byID := func(k []byte) bool { return gossip.KeyID(k) == arg }
	switch verb {
	case "install":
		keys, err := splitKeys(arg)
		if err != nil || len(keys) != 1 {
			return errors.New("install needs one key, base64 of 32 bytes")
		}
		if slices.ContainsFunc(ring, func(k []byte) bool { return bytes.Equal(k, keys[0]) }) {
			return nil
		}
		return a.setKeys(append(keys, ring...))
	case "use":
		return a.node.UseKey(arg)
	case "remove":
		switch rest := slices.DeleteFunc(ring, byID); {
		case len(rest) == len(a.present()):
			return fmt.Errorf("no key with id %s", arg)
		case len(rest) == 0:
			return errors.New("the last key cannot be removed")
		default:
			return a.setKeys(rest)
		}
	}
	return fmt.Errorf("no such change: %s", verb)
}

// noteLeft remembers that a member left: it gets no new connection, and those that stand get time to end by themselves.
func (a *Agent) noteLeft(boot uint64, now time.Time) {
	a.ring.mu.Lock()
	defer a.ring.mu.Unlock()
	if a.ring.left == nil {
		a.ring.left = map[uint64]time.Time{}
	}
	a.ring.left[boot] = now
}

func (a *Agent) dropLeft(now time.Time) {
	a.ring.mu.Lock()
	var gone []uint64
	for boot, at := range a.ring.left {
		if now.Sub(at) >= leftGrace {
			gone = append(gone, boot)
			delete(a.ring.left, boot)
		}
	}
	a.ring.mu.Unlock()
	for _, boot := range gone {
		if a.tls != nil {
			a.tls.Drop(boot)
		}
	}
}

// keyRoutes adds the console's part: ids for all, changes for those who may.
func (c *console) keyRoutes(mux *http.ServeMux) {
	if c.keys == nil {
		return
	}
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("all") == "" {
			writeJSON(w, c.keys())
			return
		}
		// It asks all agents, so it is not for everybody, though ids are.
		c.change(func(w http.ResponseWriter, r *http.Request) {
			list, err := c.allKeys(r.Context(), "list", "")
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			writeJSON(w, list)
		})(w, r)
	})
	mux.HandleFunc("POST /keys/{verb}", c.change(func(w http.ResponseWriter, r *http.Request) {
		arg, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<10)) // in the body: query strings get logged
		verb, text := r.PathValue("verb"), strings.TrimSpace(string(arg))
		if err == nil && r.URL.Query().Get("all") != "" {
			var list []AgentKeys
			if list, err = c.allKeys(r.Context(), verb, text); err == nil {
				writeJSON(w, list)
				return
			}
		} else if err == nil {
			err = c.changeKeys(verb, text)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		writeJSON(w, c.keys())
	}))
}
