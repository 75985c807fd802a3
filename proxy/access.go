package proxy

import (
	"hash/maphash"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Access is what a client's key allows. The key itself goes no further than the agent that checked it.
type Access struct {
	Tenant string // stands for the key where tenants are told apart
	Class  uint8  // highest class that its requests may ask for, 1 to 4; 0 = the default class
}

// keyHeaders are where the client libraries put a key.
var keyHeaders = [...]string{"authorization", "x-api-key", "api-key"}

// clientKey is the key that a client shows: OpenAI's Authorization: Bearer, Anthropic's x-api-key, Azure's api-key.
func clientKey(h Header) string {
	if v := h.Get("authorization"); len(v) > 7 && equalFold(v[:7], "bearer ") {
		return strings.TrimSpace(v[7:])
	}
	if v := h.Get("x-api-key"); v != "" {
		return v
	}
	return h.Get("api-key")
}

// admitClient checks what concerns the client and not its request: the name that it used for us, and its key.
func (x *exchange) admitClient() *apiError {
	p := x.p
	if !hostAllowed(p.cfg.Hosts, x.in.Host) {
		return errHostRefused
	}
	if p.cfg.Authorize == nil {
		return nil
	}
	a, ok := p.cfg.Authorize(clientKey(x.in.Header), x.in.Remote)
	if !ok {
		return errUnauthorized
	}
	x.access, x.keyed = a, true
	return nil
}

// forgetKey takes a checked key from what goes on, and puts in the tenant that it stands for.
func (x *exchange) forgetKey() {
	if !x.keyed {
		return
	}
	for _, n := range keyHeaders {
		x.header.Del(n)
	}
	if x.header.Del(headerTenant); x.access.Tenant != "" {
		x.header.Set(headerTenant, x.access.Tenant)
	}
}

// hostAllowed reports whether a Host field, with or without a port, is one of the names; an entry that begins with a dot
// stands for all names below it. No names allow every host.
func hostAllowed(names []string, host string) bool {
	if len(names) == 0 {
		return true
	}
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
	return slices.ContainsFunc(names, func(n string) bool {
		n = strings.ToLower(n)
		return host == n || n[0] == '.' && strings.HasSuffix(host, n)
	})
}

// askedClass is the class that a request asks for, 2 if it asks for none. A class above the default needs a key that allows
// it, or trust in all clients; below it nobody needs anything. Another agent has checked already.
func (x *exchange) askedClass() uint8 {
	asked := x.headerClass()
	switch {
	case asked > 0:
	case x.peek.ServiceTier == "priority" && x.role == roleEntry:
		asked = routing.ClassPriority
	case x.peek.ServiceTier == "flex":
		asked = routing.ClassFlex
	default:
		asked = routing.ClassDefault
	}
	return max(asked, x.bestClass())
}

// highestClass is the highest class that the request can turn out to ask for, before its body is read.
func (x *exchange) highestClass() uint8 { return max(x.headerClass(), x.bestClass()) }

// bestClass is the highest class that the client may ask for.
func (x *exchange) bestClass() uint8 {
	switch {
	case x.p.cfg.TrustPriority, x.role == roleTarget:
		return routing.ClassPriority
	case x.keyed && x.access.Class > 0:
		return x.access.Class
	}
	return routing.ClassDefault
}

// headerClass is the class that the request's head asks for, by name or number; 0 = none.
func (x *exchange) headerClass() uint8 {
	v := x.header.Get(headerPriority)
	if v == "" {
		return 0
	}
	if n, err := strconv.Atoi(v); err == nil && n >= 1 && n <= len(routing.ClassNames) {
		return uint8(n)
	}
	return uint8(slices.Index(routing.ClassNames[:], v) + 1)
}

// tenant is who the request shares the engine with others as, 0 = not known: the tenant of a key that was checked, else what
// the client says of itself. Nothing stops a client without a checked key from saying something else each time.
func (x *exchange) tenant() uint64 {
	name := x.header.Get(headerTenant)
	if name == "" {
		name = clientKey(x.header)
	}
	if name == "" {
		name = x.peek.User
	}
	if name == "" {
		return 0
	}
	return maphash.String(tenantSeed, name) | 1
}

var tenantSeed = maphash.MakeSeed()

// tellClass makes the class that was decided the one that the target reads.
func (x *exchange) tellClass() {
	if x.role == roleEntry {
		if x.header.Del(headerPriority); x.req.Class != 2 {
			x.header.Set(headerPriority, strconv.Itoa(int(x.req.Class)))
		}
	}
}

var (
	errUnauthorized = &apiError{Status: 401, Code: "invalid_api_key", Reason: "unauthorized", Final: true,
		Message: "The API key is missing or not valid here."}
	errHostRefused = &apiError{Status: 421, Code: "host_not_served", Reason: "host", Final: true,
		Message: "This host name is not served here (GRAPEVINE_HOSTS)."}
)

// A body must arrive at this pace, or its sender holds a place that others need.
const (
	bodyGrace = 30 * time.Second // before the pace counts
	bodyPace  = 256              // bytes/s
)

// pace tells until when the next bytes of a body must come.
type pace struct {
	began time.Time
	n     int64 // bytes so far
	timed time.Time
}

// next gives a read deadline, now and then: setting it costs as much as a small read.
func (p *pace) next(now time.Time) (deadline time.Time, set bool) {
	if p.began.IsZero() {
		p.began = now
	}
	if now.Sub(p.timed) <= bodyTimeout/10 && !p.timed.IsZero() {
		return deadline, false
	}
	p.timed = now
	deadline = p.began.Add(bodyGrace + time.Duration(p.n)*time.Second/bodyPace)
	if silent := now.Add(bodyTimeout); silent.Before(deadline) {
		deadline = silent
	}
	return deadline, true
}
