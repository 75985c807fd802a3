package agent

import (
	"net/http"
	"net/http/pprof"
)

// debug adds the profiles and the flight recorder of the running agent: for connections from this host only, since they hold addresses and show
// what runs, and since they take CPU. The token does not open them from elsewhere.
func (c *console) debug(mux *http.ServeMux) {
	local := func(next http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if !loopbackHost(r.RemoteAddr) || !c.may(r) {
				c.refuse(r)
				http.Error(w, "profiles are for connections from this host", http.StatusForbidden)
				return
			}
			next(w, r)
		}
	}
	mux.HandleFunc("GET /debug/pprof/", local(pprof.Index))
	mux.HandleFunc("GET /debug/pprof/cmdline", local(pprof.Cmdline))
	mux.HandleFunc("GET /debug/pprof/profile", local(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/symbol", local(pprof.Symbol))
	mux.HandleFunc("GET /debug/pprof/trace", local(pprof.Trace))
	mux.HandleFunc("GET /debug/flight", local(c.flight.serve))
	mux.HandleFunc("POST /debug/flight/start", local(c.flight.serveStart))
	mux.HandleFunc("POST /debug/flight/stop", local(c.flight.serveStop))
}
