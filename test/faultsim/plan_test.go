package faultsim

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// plan is what a seed stands for: everything that is decided beforehand. Times count from the fleet's start.
type plan struct {
	seed     uint64
	agents   int
	dialect  string
	policy   string
	keyed    bool // gossip and peers encrypted
	loss     float64
	deadly   bool // some prompts kill their engine
	requests []request
	faults   []fault
}

// request is one request of a client.
type request struct {
	id         string
	at         time.Duration
	entry      int // agent that it enters at, or the next that listens
	chat       bool
	stream     bool
	usage      bool
	idempotent bool
	class      string // "" = the default one
	prompt     string
	max        int
	hangUp     time.Duration // after its arrival; 0 = never
	deadline   time.Duration // x-request-timeout; 0 = none
	slow       time.Duration // the client waits so long after each event
}

// fault is something that goes wrong from at on, for so long.
type fault struct {
	at, dur time.Duration
	kind    string
	a, b    int // agents or engines
	count   int
	after   int           // tokens
	delay   time.Duration // slow-peer
	share   float64       // loss
}

func (f fault) String() string {
	s := fmt.Sprintf("%s %d", f.kind, f.a)
	if f.two() {
		s += fmt.Sprintf("-%d", f.b)
	}
	if f.count > 0 || f.after > 0 {
		s += fmt.Sprintf(" count %d after %d", f.count, f.after)
	}
	if f.delay > 0 {
		s += " " + f.delay.String()
	}
	if f.share > 0 {
		s += fmt.Sprintf(" %.0f %%", 100*f.share)
	}
	if f.dur > 0 {
		s += " for " + f.dur.String()
	}
	return s
}

func (f fault) two() bool {
	switch f.kind {
	case "part", "reset-peers", "half-open", "slow-peer":
		return true
	}
	return false
}

// deadlyMark in a prompt kills the engine that computes it.
const deadlyMark = "deadly"

// begin is when faults and requests begin: the fleet is up by then.
const (
	begin = 8 * time.Second
	span  = 22 * time.Second
)

// kinds of faults and how often each is drawn. Those of engines are enginesim's, with "engine-" before them.
var kinds = []struct {
	name   string
	weight int
}{
	{"engine-die", 10}, {"engine-slow", 4}, {"engine-hang", 5}, {"engine-silence", 3}, {"engine-refuse", 3}, {"engine-reset", 6},
	{"engine-cut", 6}, {"engine-abort", 5}, {"engine-engine-dead", 2}, {"engine-error500", 3}, {"engine-busy", 3}, {"engine-shutdown", 2},
	{"engine-loading", 2}, {"engine-unhealthy", 2}, {"engine-sleep", 1},
	{"kill", 8}, {"drain", 8}, {"stall", 6}, {"isolate", 4}, {"part", 4}, {"half-open", 3}, {"reset-peers", 5}, {"reset-engine", 4},
	{"slow-peer", 5}, {"loss", 4}, {"no-udp", 2},
}

// oneOf draws one of the words, each as likely as it stands there often.
func oneOf(r *rand.Rand, words string) string {
	list := strings.Fields(words)
	return list[r.IntN(len(list))]
}

func between(r *rand.Rand, lo, hi time.Duration) time.Duration {
	return (lo + time.Duration(r.Int64N(int64(hi-lo)))).Truncate(time.Millisecond)
}

func newPlan(seed uint64) *plan {
	r := rand.New(rand.NewPCG(seed, 0x6661756c74))
	p := &plan{seed: seed, agents: 2 + r.IntN(3)}
	p.dialect = oneOf(r, "vllm vllm vllm llamacpp sglang")
	p.policy = oneOf(r, "auto auto auto auto p2c random random local local")
	p.keyed = r.IntN(5) == 0
	if r.IntN(3) == 0 {
		p.loss = 0.1 * r.Float64()
	}
	p.deadly = r.IntN(5) == 0
	sum := 0
	for _, k := range kinds {
		sum += k.weight
	}
	for range 2 + r.IntN(6) {
		f := fault{at: begin + between(r, time.Second, span), a: r.IntN(p.agents)}
		f.b = (f.a + 1 + r.IntN(p.agents-1)) % p.agents
		n := r.IntN(sum)
		for _, k := range kinds {
			if n -= k.weight; n < 0 {
				f.kind = k.name
				break
			}
		}
		f.draw(r)
		p.faults = append(p.faults, f)
	}
	at := begin
	rate := float64(p.agents) * (0.7 + 1.6*r.Float64()) // requests/s; an engine does about two
	side := r.IntN(p.agents)
	for i := 0; at < begin+span; i++ {
		at += time.Duration(r.ExpFloat64() / rate * float64(time.Second)).Truncate(time.Microsecond)
		q := request{id: fmt.Sprintf("s%d-%d", seed, i), at: at, entry: r.IntN(p.agents), chat: r.IntN(3) > 0, stream: r.IntN(10) < 7,
			usage: r.IntN(3) == 0, idempotent: r.IntN(10) == 0, max: 1 + r.IntN(35)}
		switch i % 6 {
		case 0:
			q.class = "priority"
		case 3:
			q.class = "flex"
		}
		if r.IntN(3) == 0 {
			q.entry = side // a third enters at one agent
		}
		q.prompt = prompt(r, 20+r.IntN(60))
		if r.IntN(5) == 0 {
			q.prompt = prompt(r, 500+r.IntN(1500))
		}
		if p.deadly && r.IntN(40) == 0 {
			q.prompt += deadlyMark
		}
		switch r.IntN(12) {
		case 0, 1:
			q.hangUp = between(r, 5*time.Millisecond, 2500*time.Millisecond)
		case 2:
			q.deadline = between(r, 500*time.Millisecond, 6*time.Second)
		case 3:
			q.slow = between(r, 10*time.Millisecond, 300*time.Millisecond)
		}
		p.requests = append(p.requests, q)
	}
	return p
}

// draw fills in what a fault of its kind needs.
func (f *fault) draw(r *rand.Rand) {
	f.dur = between(r, 300*time.Millisecond, 7*time.Second)
	switch f.kind {
	case "engine-reset", "engine-cut", "engine-abort", "engine-engine-dead":
		f.count, f.after = 1+r.IntN(6), r.IntN(12)
	case "engine-error500", "engine-busy", "engine-shutdown":
		f.count = 1 + r.IntN(8)
	case "reset-peers", "half-open", "reset-engine":
		f.dur = 0
	case "slow-peer":
		f.delay = between(r, 10*time.Millisecond, 400*time.Millisecond)
	case "loss":
		f.share = 0.1 + 0.6*r.Float64()
	case "isolate", "part":
		f.dur = between(r, 300*time.Millisecond, 28*time.Second)
	}
}

func prompt(r *rand.Rand, tokens int) string {
	var b strings.Builder
	for b.Len() < 4*tokens {
		fmt.Fprintf(&b, "%04x ", r.IntN(1<<16))
	}
	return b.String()
}
