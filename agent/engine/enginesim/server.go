package enginesim

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ServerConfig describes one engine process.
type ServerConfig struct {
	Params  Params // DefaultParams if Slots is 0
	Dialect string // "vllm" (default), "sglang", "llamacpp"
	Model   string // name served; default "sim"
	Aliases []string
	Seed    uint64 // of the model: servers with equal seeds say the same

	MeanOutput  int           // tokens of an answer without limit, on average (geometric); default 128
	StopEarly   bool          // an answer may end before max_tokens; otherwise max_tokens is always reached, as with ignore_eos
	HideCached  bool          // leave out usage.prompt_tokens_details.cached_tokens, as vLLM does by default
	HangUpLag   time.Duration // from a client's hang-up to the end of its job
	Embeddings  bool          // serve /v1/embeddings too (llama.cpp and vLLM do so only for embedding models)
	LoadFor     time.Duration // the model loads: no inference for so long after the start
	KeepAlive   time.Duration // idle connections are closed after; default 5 s, as uvicorn and llama.cpp do (Serve only)
	APIKey      string        // demanded on /v1 paths if set
	Journal     io.Writer     // gets a JSON line at the start and at the end of each run, so that it survives a kill
	JournalSize int           // runs kept for GET /journal; default 100,000
	OnDie       func()        // called when a fault kills the engine, before anything is cleaned up: a process exits here. It must not call the server

	// Listen replaces the network under ListenAndServe, for tests.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
}

// Server is an engine behind HTTP. Make it with NewServer, run [Server.Run], and serve it with any http.Server or, so that
// faults reach the connections, with [Server.Serve] or [Server.ListenAndServe].
type Server struct {
	cfg      ServerConfig
	dialect  dialect
	params   Params
	instance uint64
	origin   time.Time // virtual time zero
	wake     chan struct{}
	routes   map[string]route
	conns    conns

	mu        sync.Mutex
	engine    *Engine
	dead      bool
	born      time.Time // start of the process that is played
	readyAt   time.Time // the model is loaded
	stopped   bool      // Run has ended
	nextJob   uint64
	nextID    uint64
	outputs   map[uint64]*output // by job
	calls     map[*call]struct{}
	slots     []*output // llama.cpp's view of what runs where
	faults    []*Fault
	journal   journal
	responses store
	seen      seen
}

var instances atomic.Uint64

// NewServer makes a server; it answers nothing before Run works. Errors name the wrong setting.
func NewServer(cfg ServerConfig) (*Server, error) {
	if cfg.Params.Slots == 0 {
		cfg.Params = DefaultParams()
	}
	if err := cfg.Params.Validate(); err != nil {
		return nil, err
	}
	if cfg.Model == "" {
		cfg.Model = "sim"
	}
	if cfg.MeanOutput == 0 {
		cfg.MeanOutput = 128
	}
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = 5 * time.Second
	}
	if cfg.JournalSize == 0 {
		cfg.JournalSize = 100_000
	}
	s := &Server{
		cfg: cfg, params: cfg.Params.withDefaults(), instance: instances.Add(1), origin: time.Now(),
		wake: make(chan struct{}, 1), outputs: map[uint64]*output{}, calls: map[*call]struct{}{},
		journal: journal{size: cfg.JournalSize, w: cfg.Journal},
	}
	s.engine, s.born = newEngine(cfg.Params), s.origin
	s.slots = make([]*output, s.params.Slots)
	s.seen.init()
	switch cfg.Dialect {
	case "", "vllm":
		s.dialect = vllm{s}
	case "sglang":
		s.dialect = sglang{s}
	case "llamacpp":
		s.dialect = llamacpp{s}
	default:
		return nil, fmt.Errorf("enginesim: unknown dialect %q, known are vllm, sglang, llamacpp", cfg.Dialect)
	}
	s.readyAt = s.born.Add(cfg.LoadFor)
	s.routes = s.allRoutes()
	return s, nil
}

// newEngine makes an engine that starts on a batch only a nanosecond after its first job has come: in a synctest bubble, where
// many requests come at one instant in no certain order, they share the step.
func newEngine(p Params) *Engine {
	e := New(p)
	e.wakeup = fromDuration(1)
	return e
}

// Run drives the engine until ctx ends; then every request still in work is cut off. It returns nil.
func (s *Server) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s.mu.Lock()
		s.advance()
		at, ok := s.engine.NextEvent()
		s.mu.Unlock()
		if ok {
			timer.Reset(time.Until(s.origin.Add(at)))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			s.stop()
			return nil
		case <-s.wake:
		case <-timer.C:
		}
	}
}

// stop ends everything that is in work.
func (s *Server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	for _, f := range s.faults {
		f.stop()
	}
	s.faults = nil
	s.engine.Resume(s.now())
	s.engine.Kill(s.now())
	s.advance()
	for c := range s.calls {
		c.signal()
	}
}

// now is the virtual time.
func (s *Server) now() time.Duration { return time.Since(s.origin) }

func (s *Server) bornAt() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.born
}

// nudge makes Run look at the engine again.
func (s *Server) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// advance moves the engine to the present and tells the calls what happened. s.mu is held.
func (s *Server) advance() {
	deadly := false
	for _, ev := range s.engine.Advance(s.now()) {
		o := s.outputs[ev.Job]
		if o == nil {
			continue
		}
		o.tokens = ev.Tokens
		switch ev.Kind {
		case Started:
			o.running = true
			s.occupy(o)
			if !o.started {
				o.started, o.cached = true, ev.Cached
				o.startedAt = s.origin.Add(ev.At)
				o.call.entry.started(o)
				s.seen.queued(o)
			}
		case First:
			o.firstAt = s.origin.Add(ev.At)
			o.call.entry.first(o)
			s.seen.first(o)
		case Preempted:
			o.running = false
			s.vacate(o)
		case Done, Lost:
			o.ended, o.lost = true, ev.Kind == Lost
			s.vacate(o)
			delete(s.outputs, ev.Job)
			if !o.lost {
				s.seen.done(o, s.origin.Add(ev.At))
			}
		}
		deadly = deadly || o.call.deadly.strikes(ev)
		o.call.signal()
	}
	if deadly {
		s.die()
	}
}

// occupy gives o a slot number; s.mu is held.
func (s *Server) occupy(o *output) {
	for i, x := range s.slots {
		if x == nil {
			s.slots[i], o.slot = o, i
			return
		}
	}
}

func (s *Server) vacate(o *output) {
	if o.slot >= 0 && s.slots[o.slot] == o {
		s.slots[o.slot] = nil
	}
	o.slot = -1
}

// Stats is what a test wants to know.
type Stats struct {
	Load
	Counters
	Calls int // requests whose handler has not returned
	Conns int // connections open (Serve only)
	Dead  bool
}

// Stats returns the state at this moment.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.nudge()
	return Stats{s.engine.Load(), s.engine.Counters(), len(s.calls), s.conns.len(), s.dead}
}
