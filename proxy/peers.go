package proxy

import (
	"strconv"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// formatBoot is a boot id as our headers have it.
func formatBoot(b uint64) string { return strconv.FormatUint(b, 16) }

// parseBoot reads what formatBoot wrote.
func parseBoot(s string) (uint64, bool) {
	b, err := strconv.ParseUint(s, 16, 64)
	return b, err == nil && b != 0
}

// peerLinks are the connections to other agents' peer listeners, by boot id: an agent that starts again at the same
// address is another one, and never gets requests meant for its earlier life.
type peerLinks struct {
	mu sync.RWMutex
	m  map[uint64]*peerLink
}

type peerLink struct {
	addr string
	up   upstream
}

// get returns the link to a member; its address comes from the member list and nowhere else.
func (l *peerLinks) get(cfg *Config, boot uint64, addr string) upstream {
	l.mu.RLock()
	k := l.m[boot]
	l.mu.RUnlock()
	if k != nil && k.addr == addr {
		return k.up
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := l.m[boot]; k != nil {
		if k.addr == addr {
			return k.up
		}
		k.up.close()
	}
	if l.m == nil {
		l.m = make(map[uint64]*peerLink)
	}
	k = &peerLink{addr: addr, up: newPeerUpstream(cfg, boot, addr)}
	l.m[boot] = k
	return k.up
}

// sweep closes the idle connections to those who are no members any more.
func (l *peerLinks) sweep(s *routing.Snapshot) {
	alive := make(map[uint64]bool, len(s.Peers()))
	for _, p := range s.Peers() {
		alive[p.Boot()] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for boot, k := range l.m {
		k.up.sweep(now)
		if !alive[boot] {
			k.up.close()
			delete(l.m, boot)
		}
	}
}

func (l *peerLinks) closeAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for boot, k := range l.m {
		k.up.close()
		delete(l.m, boot)
	}
}
