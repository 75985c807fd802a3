package engine

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// Reader reads one engine. Make it with [New].
type Reader struct {
	cfg    Config
	res    resolved
	err    error // of the configuration; every call returns it
	base   string
	client *http.Client

	reading sync.Mutex // held by Read
	buf     []byte

	mu       sync.Mutex // guards what follows; never held over a request
	state    *state     // nil until detected
	evidence string
	version  string
	looked   time.Time // last Detect
	doubts   int       // times that it was looked at again because it told nothing
	gone     bool      // it was refused since: what comes up next may be another engine
	last     Reading   // newest without an error
	counters Reading   // newest known counters, to tell a restart
	resets   int
	health   healthMemory
	warm     routing.Service // what answered the last warm-up
}

// New makes a Reader; it calls nothing. An invalid cfg gives a Reader whose every call returns the error of
// [Config.Validate].
func New(cfg Config) *Reader {
	r := &Reader{cfg: cfg, client: cfg.Client}
	r.res, r.err = cfg.resolve()
	if r.err != nil {
		return r
	}
	r.base = baseURL(cfg.URL)
	if r.client == nil {
		r.client = newClient(cfg.URL)
	}
	if k := r.res.kind; k != Auto {
		r.use(tableOf(k), "configured")
	}
	return r
}

// Close drops idle connections; the Reader may be used again.
func (r *Reader) Close() {
	if r.client != nil {
		r.client.CloseIdleConnections()
	}
}

// Kind is the engine's kind, Auto until it is known.
func (r *Reader) Kind() Kind {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == nil {
		return Auto
	}
	return r.state.table.Kind
}

// Evidence says how the kind was told, "" until it is known.
func (r *Reader) Evidence() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.evidence
}

// Version is the engine's own version, "" if it does not say. It is asked for by Detect and Models.
func (r *Reader) Version() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.version
}

// Abilities is what the engine can do; of an unknown engine the least.
func (r *Reader) Abilities() Abilities {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == nil {
		return openaiTable.Abilities
	}
	return r.state.table.Abilities
}

// Pace is the least time between two readings: some engines suffer from more.
func (r *Reader) Pace() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == nil {
		return 0
	}
	return r.state.table.Pace
}

// Serves are the kinds of path that the engine answers, as far as its table and the last warm-up tell; 0 unknown.
func (r *Reader) Serves() routing.Service {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.warm == routing.ServeEmbeddings: // chat and completions were tried first and refused
		return embeds | routing.ServeTokenize | routing.ServeOther
	case r.state == nil:
		return 0
	case r.warm != 0 && r.state.table.Abilities.OneTask && r.state.table.Abilities.Serves == 0:
		return routing.ServeAll &^ embeds
	}
	return r.state.table.Abilities.Serves
}

// Last is the newest reading that came without an error, for those who must not wait for one.
func (r *Reader) Last() Reading {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// Problems counts lines of wanted metrics on the newest pages that could not be read.
func (r *Reader) Problems() int {
	r.reading.Lock()
	defer r.reading.Unlock()
	r.mu.Lock()
	st := r.state
	r.mu.Unlock()
	n := 0
	if st != nil {
		for _, p := range st.pages {
			n += p.scanner.bad
		}
	}
	return n
}

// use installs a table.
func (r *Reader) use(t *Table, evidence string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.evidence = evidence
	if r.state != nil && r.state.table == t {
		return
	}
	r.state = r.newState(t)
	r.last, r.counters, r.health, r.warm = Reading{}, Reading{}, healthMemory{}, 0
}

// ensure returns the engine's table in use, looking around if it is not known yet.
func (r *Reader) ensure(ctx context.Context) (*state, error) {
	if r.err != nil {
		return nil, r.err
	}
	if st := r.current(); st != nil && !r.mayDiffer() {
		return st, nil
	}
	if _, err := r.Detect(ctx); err != nil {
		return nil, err
	}
	return r.current(), nil
}

// mayDiffer tells whether the engine was down since it was found by looking around.
func (r *Reader) mayDiffer() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gone && r.res.kind == Auto
}

func (r *Reader) current() *state {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}
