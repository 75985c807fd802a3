package agent

import "net/netip"

// gateways tells by their addresses the gateways that may choose replicas; nil = there are none.
func gateways(list []string) func(remote string) bool {
	var nets []netip.Prefix
	for _, s := range list {
		if p, err := parseNet(s); err == nil { // Validate has checked it
			nets = append(nets, p)
		}
	}
	if len(nets) == 0 {
		return nil
	}
	return func(remote string) bool {
		a, err := netip.ParseAddrPort(remote)
		if err != nil {
			return false
		}
		ip := a.Addr().Unmap().WithZone("")
		for _, n := range nets {
			if n.Contains(ip) {
				return true
			}
		}
		return false
	}
}
