package enginesim

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Fault is something that goes wrong on command. The kinds:
//
//	slow         the engine is Factor times slower
//	hang         the engine stops without a word; with Pages every page hangs too, as in a stopped process
//	silence      the engine stops, streams get a comment line each second, as from llama.cpp after SIGTERM
//	refuse       connections are refused, idle ones closed
//	die          the engine dies: at once, or when a request has After tokens. OnDie is called; see Revive
//	reset        requests are reset when they have After tokens
//	cut          the same, by closing the connection without the end of the body
//	abort        requests end with finish_reason "abort" and [DONE] after After tokens, as from vLLM after SIGTERM
//	engine-dead  streams get an error object and [DONE] after After tokens, others a 500, as from vLLM without its core
//	error500     inference is answered 500 at once
//	busy         inference is answered like a full queue
//	shutdown     inference is answered as by a vLLM that drains: 500, while /health says 200
//	loading      everything is answered as while the model loads
//	unhealthy    /health is answered 503
//	sleep        the engine says that it sleeps, and computes nothing
//	deadly       a prompt that contains Marker kills the engine: in Phase "prefill" (default), or "decode" after After tokens (default 3)
type Fault struct {
	Kind   string        `json:"kind"`
	Factor float64       `json:"factor,omitempty"` // slow
	After  int           `json:"after,omitempty"`  // tokens of the request; 0 means at once, whether it waits or runs
	Count  int           `json:"count,omitempty"`  // strikes so many requests, then ends; 0 means all
	For    time.Duration `json:"-"`                // ends after; 0 means when cleared. In JSON "for", such as "5s"
	Pages  bool          `json:"pages,omitempty"`  // hang
	Marker string        `json:"marker,omitempty"` // deadly
	Phase  string        `json:"phase,omitempty"`  // deadly

	timer *time.Timer
}

var faultKinds = []string{"slow", "hang", "silence", "refuse", "die", "reset", "cut", "abort", "engine-dead", "error500", "busy", "shutdown", "loading", "unhealthy", "sleep", "deadly"}

// tokenKinds are told by the tokens that a request has.
var tokenKinds = []string{"die", "reset", "cut", "abort", "engine-dead"}

func (f *Fault) stop() {
	if f.timer != nil {
		f.timer.Stop()
	}
}

// Inject makes a fault. Faults add up; an error names the wrong field.
func (s *Server) Inject(f Fault) error {
	switch {
	case !slices.Contains(faultKinds, f.Kind):
		return fmt.Errorf("enginesim: unknown fault %q, known are %s", f.Kind, strings.Join(faultKinds, ", "))
	case f.Kind == "slow" && f.Factor <= 0:
		return fmt.Errorf("enginesim: fault slow needs a positive factor")
	case f.Kind == "deadly" && f.Marker == "":
		return fmt.Errorf("enginesim: fault deadly needs a marker")
	case f.Kind == "deadly" && f.Phase != "" && f.Phase != "prefill" && f.Phase != "decode":
		return fmt.Errorf("enginesim: phase of a deadly fault is prefill or decode, not %q", f.Phase)
	case f.After < 0 || f.Count < 0 || f.For < 0:
		return fmt.Errorf("enginesim: after, count and for must not be negative")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	s.advance()
	if f.Kind == "die" && f.After == 0 {
		s.die()
		return nil
	}
	p := &f
	s.faults = append(s.faults, p)
	if f.For > 0 {
		p.timer = time.AfterFunc(f.For, func() { s.clear(func(g *Fault) bool { return g == p }) })
	}
	s.apply()
	return nil
}

// Clear ends all faults of a kind, or all if kind is empty. A dead engine stays dead: see Revive.
func (s *Server) Clear(kind string) {
	s.clear(func(f *Fault) bool { return kind == "" || f.Kind == kind })
}

func (s *Server) clear(which func(*Fault) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	s.advance()
	s.faults = slices.DeleteFunc(s.faults, func(f *Fault) bool {
		if which(f) {
			f.stop()
			return true
		}
		return false
	})
	s.apply()
}

// Revive starts a dead engine again, empty, as a restarted process would: the cache is cold and LoadFor counts anew.
func (s *Server) Revive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.dead || s.stopped {
		return
	}
	s.dead = false
	s.engine, s.born = newEngine(s.cfg.Params), time.Now()
	s.responses = store{}
	s.seen.init()
	s.readyAt = s.born.Add(s.cfg.LoadFor)
	s.apply()
}

// apply makes engine and listeners follow the faults; s.mu is held.
func (s *Server) apply() {
	speed := s.params.Speed
	pause, refuse := false, s.dead
	for _, f := range s.faults {
		switch f.Kind {
		case "slow":
			speed /= f.Factor
		case "hang", "silence", "sleep":
			pause = true
		case "refuse":
			refuse = true
		}
	}
	now := s.now()
	if s.engine.Params().Speed != speed {
		s.engine.SetSpeed(now, speed)
	}
	if pause {
		s.engine.Pause(now)
	} else {
		s.engine.Resume(now)
	}
	s.conns.refuse(refuse)
	for c := range s.calls {
		c.signal()
	}
	s.nudge()
}

// kill is die for those who do not hold s.mu.
func (s *Server) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.die()
}

// die ends the engine as kill -9 does: connections break, new ones are refused. s.mu is held.
func (s *Server) die() {
	if s.dead {
		return
	}
	if s.cfg.OnDie != nil {
		s.cfg.OnDie()
	}
	s.dead = true
	s.engine.Resume(s.now())
	s.engine.Kill(s.now())
	s.advance()
	s.conns.refuse(true)
	s.conns.resetAll()
	for c := range s.calls {
		c.signal()
	}
}

func (s *Server) active(kind string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.activeLocked(kind)
}

func (s *Server) activeLocked(kind string) bool {
	return slices.ContainsFunc(s.faults, func(f *Fault) bool { return f.Kind == kind })
}

// spend counts a fault's victim; s.mu is held.
func (s *Server) spend(f *Fault) {
	if f.Count == 0 {
		return
	}
	if f.Count--; f.Count == 0 {
		f.stop()
		s.faults = slices.DeleteFunc(s.faults, func(g *Fault) bool { return g == f })
	}
}

// tokenFaults reports whether somebody must watch the tokens of each request; s.mu is held.
func (s *Server) tokenFaults() bool {
	return slices.ContainsFunc(s.faults, func(f *Fault) bool { return slices.Contains(tokenKinds, f.Kind) })
}

// refusal is the fault by which inference is answered at once, if any, and the answer.
func (s *Server) refusal() (kind string, p problem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.faults {
		var k problemKind
		switch f.Kind {
		case "error500":
			k = internal
		case "busy":
			k = queueFull
		case "shutdown":
			k = shuttingDown
		default:
			continue
		}
		s.spend(f)
		return f.Kind, problem{kind: k}
	}
	return "", problem{}
}

// strike is the fault that hits a call which has said so many tokens; "" if none.
func (s *Server) strike(said int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.faults {
		if slices.Contains(tokenKinds, f.Kind) && said >= f.After {
			s.spend(f)
			return f.Kind
		}
	}
	return ""
}

// deadly says when a request kills its engine.
type deadly struct {
	phase string
	after int
}

// marked looks for the prompt's deadly mark.
func (s *Server) marked(prompts []prompt) deadly {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.faults {
		if f.Kind != "deadly" {
			continue
		}
		for _, p := range prompts {
			if strings.Contains(p.text, f.Marker) {
				d := deadly{"prefill", 3}
				if f.Phase != "" {
					d.phase = f.Phase
				}
				if f.After > 0 {
					d.after = f.After
				}
				return d
			}
		}
	}
	return deadly{}
}

func (d deadly) strikes(ev Event) bool {
	switch d.phase {
	case "prefill":
		return ev.Kind == Started
	case "decode":
		return ev.Tokens >= d.after && ev.Kind != Lost
	}
	return false
}
