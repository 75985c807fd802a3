package proxy

import (
	"net"
	"slices"
	"strings"
)

// Names of our own header fields. All are stripped from what clients send but for the three that survive, and from
// what engines answer.
const (
	headerHop       = "x-grapevine-hop"  // on requests between agents: boot id of the entry agent, hexadecimal
	headerLoad      = "x-grapevine-load" // on answers between agents: the sender's load record, base64
	headerPriority  = "x-grapevine-priority"
	headerTenant    = "x-grapevine-tenant"
	headerSession   = "x-grapevine-session"
	headerRequestID = "x-request-id"

	headerPrefix = "x-grapevine-"
)

// routingHeaders are names by which other gateways let a header choose the upstream. From a client they are never
// passed on: an engine's own router behind us might follow them.
var routingHeaders = newNameSet("x-prefiller-url", "x-prefiller-host-port", "x-kv-cache-source-host-port",
	"x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served",
	"x-provider-endpoint", "x-original-dst-host", "x-envoy-original-dst-host", "x-smg-target-worker", "target-pod",
	"x-target-pod", "x-worker-url", "x-route-to", "x-backend-url", "x-data-parallel-host-port")

// hopByHop are the fields that concern one connection only (RFC 9110, section 7.6.1), and those that a proxy answers
// for itself. Expect is among them because the body is here before the request goes on.
var hopByHop = newNameSet("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te",
	"trailer", "transfer-encoding", "upgrade", "http2-settings", "expect", "content-length", "host")

func isHopByHop(name string) bool { return hopByHop.has(name) }

// hasPrefixFold reports whether s begins with prefix, without regard to case.
func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && equalFold(s[:len(prefix)], prefix)
}

// stripHopByHop removes what must not go further: the fixed list and whatever Connection names; and what also says.
func stripHopByHop(h *Header, also func(name string) bool) {
	var list [4]string
	named := list[:0]
	for _, f := range *h {
		if equalFold(f.Name, "connection") {
			for t := range strings.SplitSeq(f.Value, ",") {
				if t = strings.TrimSpace(t); t != "" {
					named = append(named, t)
				}
			}
		}
	}
	h.DelFunc(func(name string) bool {
		if isHopByHop(name) || also(name) {
			return true
		}
		for _, n := range named {
			if equalFold(n, name) {
				return true
			}
		}
		return false
	})
}

// wantsTrailers reports whether the sender said that it takes trailers; it is the one value of TE that goes on.
func wantsTrailers(h Header) bool {
	for _, f := range h {
		if equalFold(f.Name, "te") {
			for t := range strings.SplitSeq(f.Value, ",") {
				if t, _, _ = strings.Cut(t, ";"); equalFold(strings.TrimSpace(t), "trailers") {
					return true
				}
			}
		}
	}
	return false
}

// cleanRequest makes a client's fields fit to be sent on: hop-by-hop fields first, so that Connection cannot name
// what is added afterwards, then ours and other gateways'. trusted keeps ours (they came from an agent). h is memory
// that may be used.
func cleanRequest(h Header, in *RequestHead, trusted bool) Header {
	h = append(slices.Grow(h[:0], len(in.Header)+6), in.Header...)
	trailers := wantsTrailers(h)
	also := foreign
	if trusted {
		also = nothing
	}
	stripHopByHop(&h, also)
	if trailers {
		h.Add("te", "trailers")
	}
	return h
}

// foreign reports whether a client's field must not go further.
func foreign(name string) bool {
	if hasPrefixFold(name, headerPrefix) {
		return !equalFold(name, headerPriority) && !equalFold(name, headerTenant) &&
			!equalFold(name, headerSession)
	}
	return routingHeaders.has(name)
}

func nothing(string) bool { return false }

// forwarded adds the client's address and what it asked for, by one rule for every path: the entry agent appends to
// X-Forwarded-For and fills X-Forwarded-Host and -Proto where they are absent; the target passes them on as they are,
// so that agents never appear in them. Host itself stays the client's up to the engine.
func forwarded(h *Header, in *RequestHead) {
	ip, _, err := net.SplitHostPort(in.Remote)
	if err != nil {
		ip = in.Remote
	}
	if ip != "" && ip != "@" {
		all := ip
		if h.Has("x-forwarded-for") {
			prior := make([]string, 0, 4)
			for _, f := range *h {
				if equalFold(f.Name, "x-forwarded-for") {
					prior = append(prior, f.Value)
				}
			}
			all = strings.Join(append(prior, ip), ", ")
			h.Del("x-forwarded-for")
		}
		h.Add("x-forwarded-for", all)
	}
	if in.Host != "" && !h.Has("x-forwarded-host") {
		h.Add("x-forwarded-host", in.Host)
	}
	if in.Scheme != "" && !h.Has("x-forwarded-proto") {
		h.Add("x-forwarded-proto", in.Scheme)
	}
}

// cleanResponse makes an answer's fields fit for the client. fromAgent keeps the reason that an agent gave.
func cleanResponse(h *Header, fromAgent bool) {
	stripHopByHop(h, func(name string) bool {
		return hasPrefixFold(name, headerPrefix) && !(fromAgent && equalFold(name, headerReason))
	})
}

// cleanTrailer drops from an answer's trailer what may not stand in one, above all what frames (RFC 9110, section 6.5.1), and
// what is in our name.
func cleanTrailer(h *Header) {
	h.DelFunc(func(name string) bool { return isHopByHop(name) || hasPrefixFold(name, headerPrefix) })
}

// validRequestID reports whether a client's id may be kept: what fits in a log line and a header, and is bounded.
func validRequestID(s string) bool {
	if s == "" || len(s) > 128 {
		return false
	}
	for i := 0; i < len(s); i++ {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// isEventStream reports whether the content type is text/event-stream, whatever its case and parameters.
func isEventStream(h Header) bool {
	t, _, _ := strings.Cut(h.Get("content-type"), ";")
	return equalFold(strings.TrimSpace(t), "text/event-stream")
}

// isGRPC reports whether the request speaks gRPC.
func isGRPC(h Header) bool { return hasPrefixFold(h.Get("content-type"), "application/grpc") }
