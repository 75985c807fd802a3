package proxy

import (
	"slices"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

const pickRing = 256 // requests remembered

// PickAttempt is one replica that a request was sent to.
type PickAttempt struct {
	Node       string         `json:"node"`
	Boot       uint64         `json:"-"`
	Reason     routing.Reason `json:"reason"`
	ScoreMS    float64        `json:"score_ms"`
	RunnerUp   string         `json:"runner_up,omitempty"`
	RunnerUpMS float64        `json:"runner_up_ms,omitempty"`
	AgeMS      float64        `json:"report_age_ms"` // -1: no report yet
	Asked      int            `json:"asked"`         // other replicas asked for their exact score
	Answered   int            `json:"answered"`      // answers in time, our own among them
	AskMS      float64        `json:"ask_ms"`
	Result     string         `json:"result"`
}

// PickRecord says where a request went and why. It holds no prompt, no key and no header but the request's id.
type PickRecord struct {
	At           time.Time     `json:"at"`
	ID           string        `json:"id"`
	Role         string        `json:"role"` // entry or target
	Route        string        `json:"route"`
	Model        string        `json:"model"`
	PromptTokens int           `json:"prompt_tokens"`
	Candidates   int           `json:"candidates"` // members known at the pick
	Attempts     []PickAttempt `json:"attempts"`
	Outcome      string        `json:"outcome"`
	Status       int           `json:"status"`
	TTFTMS       float64       `json:"ttft_ms"` // 0: no content
	DurationMS   float64       `json:"duration_ms"`
	Trace        string        `json:"trace,omitempty"` // of OpenTelemetry, where it is recorded

	// In shadow mode: the replica that it would have gone to, and its predicted times to first token here and there.
	Shadow        string  `json:"shadow,omitempty"`
	ShadowHereMS  float64 `json:"shadow_here_ms,omitempty"`
	ShadowThereMS float64 `json:"shadow_there_ms,omitempty"`
}

// pickNote is what an exchange notes for its record.
type pickNote struct {
	PromptTokens, Candidates    int
	Attempts                    []PickAttempt
	Shadow                      string
	ShadowHereMS, ShadowThereMS float64
}

// pickLog is a ring of the last requests.
type pickLog struct {
	mu   sync.Mutex
	ring [pickRing]struct {
		PickRecord
		own [1]PickAttempt // most have one
	}
	n uint64 // records ever written
}

// add writes a record and reads nothing of the one before, which has long left the caches.
func (l *pickLog) add(r *PickRecord) {
	l.mu.Lock()
	at := &l.ring[l.n%pickRing]
	at.PickRecord = *r
	at.Attempts = append(at.own[:0], r.Attempts...) // r's are used again
	l.n++
	l.mu.Unlock()
}

// Picks returns the last requests, newest first; with an id only those of that request id.
func (p *Proxy) Picks(id string) []PickRecord {
	l := &p.picks
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []PickRecord
	for i := uint64(0); i < min(l.n, pickRing); i++ {
		r := l.ring[(l.n-1-i)%pickRing].PickRecord
		if id == "" || r.ID == id {
			r.Attempts = slices.Clone(r.Attempts)
			out = append(out, r)
		}
	}
	return out
}
