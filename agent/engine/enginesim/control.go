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

// Control serves /fault and /journal only. The server's own handler has them too, but not while it hangs or refuses.
func (s *Server) Control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/fault", s.serveFault)
	mux.HandleFunc("GET /journal", s.serveJournal)
	return mux
}
