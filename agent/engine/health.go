package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"
)

// HealthState is what the engine's health page says. Health pages are weak evidence: vLLM's stays 200 while it
// drains, and says nothing about a hung engine.
type HealthState uint8

const (
	Down         HealthState = iota // refused, or it says that it is broken
	Loading                         // it answers, but its model is not there yet
	Healthy                         //
	Asleep                          // weights or cache released until woken
	Draining                        // was healthy, takes nothing new
	Unresponsive                    // no answer in time: loaded, or hung. One alone means nothing
)

var healthNames = [...]string{"down", "loading", "healthy", "asleep", "draining", "unresponsive"}

// String returns the state in lower case.
func (s HealthState) String() string {
	if int(s) < len(healthNames) {
		return healthNames[s]
	}
	return "invalid"
}

// slowFor is how old a reading may be that stands in for a slow health page.
const slowFor = 3 * time.Second

// Health is the outcome of one check.
type Health struct {
	State  HealthState
	Detail string // one line for people
}

// Probe is a health page. The first one that the engine has is used.
type Probe struct {
	Path  string
	Rules []Rule // the first that matches decides; otherwise 200 is Healthy and all else Down
	// Slow: answering takes the engine a second or more. No answer in time means nothing while its load page is read.
	Slow bool
}

// Rule gives a reply its meaning.
type Rule struct {
	Reply
	State HealthState
	// Before replaces State until the engine has been healthy once: SGLang answers 503 both while it loads and
	// while it drains.
	Before optState
	// Empty: the rule holds if the member data of the JSON body is an empty list.
	Empty bool
}

// optState is an optional state; the zero value means none.
type optState struct {
	State HealthState
	OK    bool
}

func until(s HealthState) optState { return optState{State: s, OK: true} }

// healthMemory is what a probe must know of the ones before it.
type healthMemory struct {
	path    string // the page that the engine has
	healthy bool   // it was healthy since it was last refused
}

// Health asks the engine's cheapest health page. Asleep comes from the page, or from the newest reading where only
// the metrics say so.
func (r *Reader) Health(ctx context.Context) Health {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.timeout())
	defer cancel()
	st, err := r.ensure(ctx)
	if err != nil {
		return r.unhealthy(err)
	}
	r.mu.Lock()
	known := r.health.path
	r.mu.Unlock()
	for _, p := range st.table.Health {
		if known != "" && p.Path != known {
			continue
		}
		a, err := r.get(ctx, p.Path, "*/*", nil)
		if p.Slow && errors.Is(err, ErrTimeout) && time.Since(r.Last().At) < slowFor {
			return Health{State: Healthy, Detail: p.Path + " is slow, but the load page answers"}
		}
		if err != nil {
			return r.unhealthy(err)
		}
		if a.status == http.StatusNotFound && p.Path != st.table.Health[len(st.table.Health)-1].Path && known == "" {
			continue
		}
		return r.judge(st.table, p, a)
	}
	return Health{State: Down, Detail: "no health page"}
}

// HealthPath is the engine's health page: the one that answered last, else the first of its table, else /health.
func (r *Reader) HealthPath() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.health.path != "":
		return r.health.path
	case r.state != nil && len(r.state.table.Health) > 0:
		return r.state.table.Health[0].Path
	}
	return "/health"
}

// judge turns an answer into a state and remembers it.
func (r *Reader) judge(t *Table, p Probe, a answer) Health {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := Health{State: Down, Detail: (&StatusError{Path: p.Path, Status: a.status, Body: snippet(a.body)}).Error()}
	if a.status == http.StatusOK {
		h = Health{State: Healthy, Detail: p.Path + " answered 200"}
	}
	for _, rule := range p.Rules {
		if rule.matches(a.status, a.body) && (!rule.Empty || emptyList(a.body)) {
			h.State = rule.State
			if rule.Before.OK && !r.health.healthy {
				h.State = rule.Before.State
			}
			h.Detail = (&StatusError{Path: p.Path, Status: a.status, Body: snippet(a.body)}).Error()
			break
		}
	}
	r.health.path = p.Path
	if a.status == http.StatusNotFound {
		r.health.path = "" // an engine of another version may have taken its place
	}
	if h.State == Healthy {
		r.health.healthy = true
		if r.last.Asleep.V && !t.Abilities.WakesByItself && time.Since(r.last.At) < staleAfter {
			h = Health{State: Asleep, Detail: "metrics say that it sleeps"}
		}
	}
	return h
}

// unhealthy turns a transport error into a state.
func (r *Reader) unhealthy(err error) Health {
	var status *StatusError
	switch {
	case errors.Is(err, ErrTimeout):
		return Health{State: Unresponsive, Detail: err.Error()}
	case errors.As(err, &status): // while looking around
		if status.Status == http.StatusServiceUnavailable {
			return Health{State: Loading, Detail: err.Error()}
		}
	case errors.Is(err, ErrRefused):
		r.mu.Lock()
		r.health.healthy, r.gone = false, true
		r.mu.Unlock()
	}
	return Health{State: Down, Detail: err.Error()}
}

// emptyList tells whether a model list has no model.
func emptyList(body []byte) bool {
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	return json.Unmarshal(body, &list) == nil && len(list.Data) == 0
}
