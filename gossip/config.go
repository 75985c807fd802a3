package gossip

import (
	"context"
	"log/slog"
	"net"
	"net/netip"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/serf/serf"

	"github.com/grapevine-lb/grapevine/routing"
)

// Resolver looks up join addresses. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error)
}

// MemberEvent says what became of a member.
type MemberEvent uint8

// The events. After Left, Failed and Gone the member is not alive; Failed and Left members may come back as Joined.
const (
	MemberJoined   MemberEvent = iota // alive, also after Failed
	MemberUpdated                     // alive, its identity changed
	MemberLeft                        // on purpose
	MemberFailed                      // found dead by probes
	MemberReplaced                    // its successor under the same name joined and it does not answer
	MemberGone                        // forgotten after it left or failed
)

var memberEventNames = [...]string{"joined", "updated", "left", "failed", "replaced", "gone"}

// String returns the lower-case word of the event.
func (e MemberEvent) String() string {
	if int(e) < len(memberEventNames) {
		return memberEventNames[e]
	}
	return "unknown"
}

// Alive reports whether the member can be chosen after the event.
func (e MemberEvent) Alive() bool { return e == MemberJoined || e == MemberUpdated }

// Config is what a node needs. The zero value of a field that is not marked as required is usable.
type Config struct {
	// NodeName is the name that stays over restarts, such as the pod's. The node calls itself NodeName.<boot8>.
	NodeName string

	// Member is our own identity. Boot and Addr (host:port of the peer listener; an empty host means the advertised
	// address) are required. Node and Version are set by New.
	Member routing.Member

	// Cluster keeps deployments in one network apart: packets of another cluster are refused. At most 255 bytes.
	Cluster string

	// Listen is host:port for TCP and UDP, ":7946" if empty. Port 0 takes a free one.
	Listen string

	// Advertise is the IP or host that peers reach; see AdvertiseAddr for the default.
	Advertise string

	// Join lists seeds: host[:port], a DNS name that is resolved to all its addresses again and again, or srv+name.
	// Without a port the listener's is taken.
	Join []string

	// Keys is the key ring, newest first. The first encrypts, all decrypt. None: plain text; see RequireKey.
	Keys [][]byte

	// Insecure allows to listen beyond loopback without a key.
	Insecure bool

	// Profile is auto, lan, large or wan; see ProfileNamed.
	Profile string

	// Logger gets our own lines and those of Serf; slog.Default if nil.
	Logger *slog.Logger

	// Transport replaces the sockets in tests; Listen and Advertise are then not used.
	Transport memberlist.Transport

	// Resolver replaces net.DefaultResolver.
	Resolver Resolver

	// OnMember gets the changes of other members, in order, from one goroutine. It may block: later events about a
	// member replace earlier ones that wait.
	OnMember func(routing.Member, MemberEvent)

	// OnRefused gets the name of a member that is no candidate because of its peer address, and why; at most every 10 s.
	OnRefused func(name, why string)

	// OnReport gets each new record of a known member, at most once and newest last seen by this node only. It is called
	// from the goroutine that receives packets and must return within microseconds.
	OnReport func(routing.Report)

	// OnDelta gets the prefix digest deltas of known members as they arrive, under the rules of OnReport.
	OnDelta func(routing.Delta)

	tune func(*serf.Config) // tests change Serf's configuration with it
}
