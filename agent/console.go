package agent

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/common/expfmt"
)

// console is the status listener: reads for everybody, changes for loopback or a token. It shows no prompts and no keys.
// Its fields are the agent's answers, so that a test can put its own.
type console struct {
	status  func() Status
	metrics func(*gathering)
	alive   func() error                                        // nil while the loops of the agent turn
	ready   func(entry bool) (bool, string)                     // own replica, or with entry any replica
	picks   func(id string) any                                 // recent picks, newest first
	explain func(target string, h http.Header, body []byte) any // where a request would go now; body nil: by the query's numbers
	drain   func() bool                                         // begins a drain; false if one was under way
	drained func(ctx context.Context) string                    // blocks as /drained promises, and says how it ended
	health  func(ctx context.Context) (*http.Response, error)   // the engine's own pages, passed verbatim
	scrape  func(ctx context.Context) (*http.Response, error)

	keys       func() any                   // ids of the gossip keys; nil = the agent has none
	changeKeys func(verb, arg string) error // see Agent.changeKeys
	allKeys    func(ctx context.Context, verb, arg string) ([]AgentKeys, error)
	token      string
	every      time.Duration // between two events of the live page

	mode func(to string) error // switches the fleet

	refused func(remote, path string) // is told of each change that is refused; may be nil

	flight *flight

	subscribers atomic.Int64
}

// handler returns the routes of the console.
func (c *console) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", c.page)
	mux.Handle("GET /page/", http.FileServerFS(pageFiles))
	mux.HandleFunc("GET /events", c.events)
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) { writeJSON(w, c.status()) })
	mux.HandleFunc("GET /picks", func(w http.ResponseWriter, r *http.Request) { writeJSON(w, c.picks(r.FormValue("id"))) })
	c.debug(mux)
	mux.HandleFunc("POST /mode", c.change(c.setMode))
	mux.HandleFunc("GET /explain", c.explainNumbers)
	mux.HandleFunc("POST /explain", c.change(c.explainBody))
	mux.HandleFunc("GET /livez", c.livez)
	mux.HandleFunc("GET /readyz", c.readyz)
	mux.HandleFunc("GET /metrics", c.exposition)
	mux.HandleFunc("GET /drained", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, c.drained(r.Context())) })
	mux.HandleFunc("GET /engine/health", func(w http.ResponseWriter, r *http.Request) { verbatim(w, r, c.health) })
	mux.HandleFunc("GET /engine/metrics", func(w http.ResponseWriter, r *http.Request) { verbatim(w, r, c.scrape) })
	c.keyRoutes(mux)
	mux.HandleFunc("POST /drain", c.change(func(w http.ResponseWriter, r *http.Request) {
		began := c.drain()
		w.WriteHeader(http.StatusAccepted)
		if began {
			fmt.Fprintln(w, "draining")
		} else {
			fmt.Fprintln(w, "draining already")
		}
	}))
	// A page of another site must not make a browser on this host post to loopback.
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.refuse(r)
		http.Error(w, "cross-origin request", http.StatusForbidden)
	}))
	guarded := origin.Handler(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
		guarded.ServeHTTP(w, r)
	})
}

// change lets only those through who may change something.
func (c *console) change(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !c.may(r) {
			c.refuse(r)
			http.Error(w, "changes need a connection from this host, or the token of "+Prefix+"STATUS_TOKEN", http.StatusForbidden)
			return
		}
		next(w, r)
	}
}

func (c *console) refuse(r *http.Request) {
	if c.refused != nil {
		c.refused(r.RemoteAddr, r.URL.Path)
	}
}

func (c *console) may(r *http.Request) bool {
	if token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		return c.token != "" && subtle.ConstantTimeCompare([]byte(token), []byte(c.token)) == 1
	}
	// The Host must be loopback too: a name of a stranger that resolves to 127.0.0.1 is DNS rebinding. A request that a
	// proxy on this host passed on comes from elsewhere.
	return loopbackHost(r.RemoteAddr) && loopbackHost(r.Host) && r.Header.Get("Forwarded") == "" && r.Header.Get("X-Forwarded-For") == ""
}

func loopbackHost(hostport string) bool {
	h, _, err := net.SplitHostPort(hostport)
	if err != nil {
		h = strings.Trim(hostport, "[]")
	}
	if h == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(h)
	return err == nil && ip.Unmap().IsLoopback()
}

func (c *console) livez(w http.ResponseWriter, r *http.Request) {
	if err := c.alive(); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// readyz is about the own replica; with ?entry=1 it is about whether a request that enters here can be answered.
func (c *console) readyz(w http.ResponseWriter, r *http.Request) {
	entry := r.FormValue("entry") == "1" || r.FormValue("entry") == "true"
	ok, why := c.ready(entry)
	if !ok {
		http.Error(w, "not ready: "+why, http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ready")
}

func (c *console) exposition(w http.ResponseWriter, r *http.Request) {
	g := newGathering()
	c.metrics(g)
	g.add(MetricGoroutines, float64(runtime.NumGoroutine()))
	g.add(MetricStatusSubscribers, float64(c.subscribers.Load()))
	format := expfmt.NegotiateAccept(r.Header, expfmt.DefaultAcceptedFormats()...)
	w.Header().Set("Content-Type", string(format))
	_ = g.write(w, format) // the client hung up
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // the client hung up
}
