package enginesim

import (
	"encoding/json"
	"io"
	"net/http"
	"time"
)

// serveFault is POST /fault. Besides the kinds of Fault it takes "clear" (with "only": one kind) and "revive". GET lists.
func (s *Server) serveFault(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost {
		var in struct {
			Fault
			For  string `json:"for"`
			Only string `json:"only"`
		}
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(body, &in)
		}
		if err == nil && in.For != "" {
			in.Fault.For, err = time.ParseDuration(in.For)
		}
		if err == nil {
			switch in.Kind {
			case "clear":
				s.Clear(in.Only)
			case "revive":
				s.Revive()
			default:
				err = s.Inject(in.Fault)
			}
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	s.mu.Lock()
	list := make([]Fault, len(s.faults))
	for i, f := range s.faults {
		list[i] = *f
	}
	s.mu.Unlock()
	b, err := json.Marshal(list)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
}

// State is what GET /state tells: the engine's exact state in that moment, which no real engine's pages have.
type State struct {
	Running int     `json:"running"`
	Waiting int     `json:"waiting"`
	Pending int     `json:"pending"` // prompt tokens neither computed nor cached
	Slots   int     `json:"slots"`
	Rate    float64 `json:"rate"` // prompt tokens/s of a full step
}

// State returns the engine's exact state now.
func (s *Server) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.nudge()
	l, p := s.engine.Load(), s.engine.Params()
	return State{Running: l.Running, Waiting: l.Waiting, Pending: l.Pending, Slots: p.Slots, Rate: p.PrefillRate()}
}

func (s *Server) serveState(w http.ResponseWriter, _ *http.Request) {
	b, _ := json.Marshal(s.State()) // numbers only
	s.reply(w, http.StatusOK, "application/json", b)
}

// Control serves /fault, /journal and /state only. The server's own handler has them too, but not while it hangs or refuses.
func (s *Server) Control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/fault", s.serveFault)
	mux.HandleFunc("GET /journal", s.serveJournal)
	mux.HandleFunc("GET /state", s.serveState)
	return mux
}
