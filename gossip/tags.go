package gossip

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/grapevine-lb/grapevine/routing"
)

// ProtocolVersion is what this build speaks between agents (tag v): 1 is the first release.
const ProtocolVersion = 1

// Tags of a member. They hold what changes rarely, since a change is a broadcast to all. Short names: all tags of a
// node travel in one packet of at most 512 bytes.
const (
	tagBoot    = "b" // boot id, 16 hex digits
	tagPod     = "p" // node name without the boot id, the same after a restart
	tagAddr    = "a" // host:port of the peer listener
	tagZone    = "z"
	tagCluster = "c"
	tagEngine  = "e" // kind of engine
	tagModels  = "m" // digest of the model list, 8 hex digits
	tagKeys    = "k" // ids of the keys that this agent can read, newest first
	tagVersion = "v" // protocol version
)

// identity is a member as its tags say.
type identity struct {
	routing.Member
	pod     string
	cluster string
	keys    string
	models  routing.Opt[uint32]
}

func (id *identity) tags() map[string]string {
	t := map[string]string{
		tagBoot:    fmt.Sprintf("%016x", id.Boot),
		tagPod:     id.pod,
		tagAddr:    id.Addr,
		tagVersion: strconv.Itoa(id.Version),
	}
	for k, v := range map[string]string{tagZone: id.Zone, tagCluster: id.cluster, tagEngine: id.Engine, tagKeys: id.keys} {
		if v != "" {
			t[k] = v
		}
	}
	if id.models.OK {
		t[tagModels] = fmt.Sprintf("%08x", id.models.V)
	}
	return t
}

// parseTags reads a member's tags. Members without a boot id (stock Serf agents) or with a broken one are no replicas.
// A peer address without a host gets the member's own.
func parseTags(node string, ip net.IP, tags map[string]string) (identity, error) {
	var id identity
	b, err := hex.DecodeString(tags[tagBoot])
	if err != nil || len(b) != 8 {
		return id, fmt.Errorf("member %s: tag %s is no boot id: %q", node, tagBoot, tags[tagBoot])
	}
	id.Boot = binary.BigEndian.Uint64(b)
	host, port, err := net.SplitHostPort(tags[tagAddr])
	if err != nil {
		return id, fmt.Errorf("member %s: tag %s is no peer address: %q", node, tagAddr, tags[tagAddr])
	}
	if a, err := netip.ParseAddr(host); host == "" || (err == nil && a.IsUnspecified()) {
		host = ip.String()
	}
	id.Node, id.Addr = node, net.JoinHostPort(host, port)
	id.Zone, id.Engine = tags[tagZone], tags[tagEngine]
	id.Version, _ = strconv.Atoi(tags[tagVersion])
	id.pod, id.cluster, id.keys = tags[tagPod], tags[tagCluster], tags[tagKeys]
	if d, err := strconv.ParseUint(tags[tagModels], 16, 32); err == nil {
		id.models = routing.Some(uint32(d))
	}
	return id, nil
}

// maxPodName leaves room for the boot id in Serf's limit of 128 characters.
const maxPodName = 100

// podName makes a valid node name of what the operator or the host says: letters, digits, '-' and '.'.
func podName(s string) string {
	s = strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '.':
			return r
		}
		return '-'
	}, s), "-.")
	if len(s) > maxPodName {
		s = s[:maxPodName]
	}
	if s == "" {
		return "agent"
	}
	return s
}

// NodeName is the name of one start of an agent, unique by its boot id: <name>.<first 8 digits of the boot id>. A
// restart is therefore a new member and never fights with its former self about the name.
func NodeName(name string, boot uint64) string {
	return fmt.Sprintf("%s.%08x", podName(name), uint32(boot>>32))
}
