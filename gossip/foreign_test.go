package gossip

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
)

// dnsAnswers is a resolver whose answers are cut from foreign bytes.
type dnsAnswers struct{ b []byte }

func (d *dnsAnswers) LookupNetIP(context.Context, string, string) (out []netip.Addr, err error) {
	for rest := d.b; len(rest) >= 4; rest = rest[4:] {
		a, _ := netip.AddrFromSlice(rest[:4])
		out = append(out, a)
		if len(rest) >= 16 {
			a, _ = netip.AddrFromSlice(rest[:16])
			out = append(out, a)
		}
	}
	return out, nil
}

func (d *dnsAnswers) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	var out []*net.SRV
	for s := range strings.SplitSeq(string(d.b), "\n") {
		out = append(out, &net.SRV{Target: s, Port: uint16(len(s) * 997)})
	}
	return "", out, nil
}

// FuzzDNSAnswers: whatever a resolver answers, what is dialled are addresses of single hosts, and not too many.
func FuzzDNSAnswers(f *testing.F) {
	f.Add("a.example", []byte{10, 0, 0, 1, 10, 0, 0, 2})
	f.Add("srv+_g._tcp.example", []byte("a.example.\nb.example.\n10.0.0.1\n::"))
	f.Add("a.example", []byte{0, 0, 0, 0, 224, 0, 0, 1, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, seed string, b []byte) {
		if ParseJoin([]string{seed}) != nil {
			return
		}
		j := &joiner{port: DefaultPort, resolver: &dnsAnswers{b}}
		got, err := j.lookup(t.Context(), seed)
		if err != nil {
			return
		}
		if len(got) > maxAddrs*maxTargets {
			t.Fatalf("%d addresses", len(got))
		}
		for _, s := range got {
			a, err := netip.ParseAddrPort(s)
			_, literal := netip.ParseAddr(strings.TrimPrefix(seed, "srv+"))
			if err != nil || !strings.HasPrefix(seed, "srv+") && literal != nil && (a.Addr().IsUnspecified() || a.Addr().IsMulticast()) {
				if h, _, e := net.SplitHostPort(seed); e == nil && net.ParseIP(h) != nil || net.ParseIP(strings.TrimSuffix(strings.TrimPrefix(seed, "["), "]")) != nil {
					continue // the operator's own word
				}
				t.Fatalf("%q gives %q: %v", seed, s, err)
			}
		}
	})
}

// FuzzTags: the tags of a foreign member give an identity whose address can be split and dialled, or an error.
func FuzzTags(f *testing.F) {
	f.Add("n", "00000000000000ab", "10.0.0.1:8081", "c", "00112233", "1", []byte{10, 0, 0, 1})
	f.Add("n", "x", ":8081", "", "", "-5", []byte{})
	f.Add("n", "00000000000000ab", "[fe80::1%eth0]:1", "", "", "9999999999999999999", []byte{1})
	f.Fuzz(func(t *testing.T, node, boot, addr, cluster, keys, version string, ip []byte) {
		id, err := parseTags(node, net.IP(ip), map[string]string{tagBoot: boot, tagAddr: addr, tagCluster: cluster, tagKeys: keys, tagVersion: version})
		if err != nil {
			return
		}
		if _, _, err := net.SplitHostPort(id.Addr); err != nil {
			t.Fatalf("address %q: %v", id.Addr, err)
		}
		n := &Node{addr: "10.9.9.9:7946"}
		if n.checkTarget(id, net.IP(ip)) == nil {
			a, err := netip.ParseAddrPort(id.Addr)
			if err != nil || a.Addr().IsLoopback() || a.Addr().IsLinkLocalUnicast() || a.Addr().Unmap() != mustAddr(ip) {
				t.Fatalf("%q from %v may be dialled", id.Addr, net.IP(ip))
			}
		}
	})
}

func mustAddr(ip []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
