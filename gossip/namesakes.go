package gossip

import (
	"log/slog"
	"net"
	"sync"
	"time"
)

// A pod name that a member has already: usually the former life of a killed agent, known dead by this 3 to 5 s before the
// probes say so. If it answers, two agents share a name, which is an operator's mistake and works all the same.

const (
	maxNamesakes = 3                // a pod has one former life, or two; many agents of one name are not asked for one another
	namesakeGap  = 10 * time.Minute // between two warnings
)

// namesakes remembers when the operator was last told.
type namesakes struct {
	mu     sync.Mutex
	warned time.Time
}

// checkNamesakes looks at those who have the name of a member that joined.
func (n *Node) checkNamesakes(m news) {
	olds := n.book.namesakes(m.id)
	if m.id.pod == n.id.pod { // our own former life
		olds = append(olds, m)
	}
	if len(olds) > maxNamesakes {
		n.warnNamesake(m.id.pod)
		return
	}
	for _, old := range olds {
		if old.since.After(m.since) {
			continue // that one is the newer; its own join checks us
		}
		n.wg.Go(func() { n.checkNamesake(old) })
	}
}

// checkNamesake looks whether a member is alive after another one joined under the same name.
func (n *Node) checkNamesake(old news) {
	ua, err := net.ResolveUDPAddr("udp", old.addr)
	if err != nil {
		return
	}
	for range 2 {
		if _, err := n.serf.Memberlist().Ping(old.name, ua); err == nil {
			n.warnNamesake(old.id.pod)
			return
		}
		select {
		case <-n.done:
			return
		default:
		}
	}
	n.book.replace(old.name)
}

func (n *Node) warnNamesake(pod string) {
	n.namesakes.mu.Lock()
	now := time.Now()
	tell := n.namesakes.warned.IsZero() || now.Sub(n.namesakes.warned) >= namesakeGap
	if tell {
		n.namesakes.warned = now
	}
	n.namesakes.mu.Unlock()
	if tell {
		n.log.Warn("two agents have the same node name; give each its own GRAPEVINE_NODE_NAME", slog.String(keyMember, pod))
	}
}
