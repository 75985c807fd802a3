package routing

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the story files' answers anew")

// TestStories plays the files in testdata/stories: lines that begin with ">" are commands, the lines after one are its
// answer. Run with -update after a change, and read the difference as a story.
//
//	fleet n                            n idle members of model m; 1 is ourselves
//	member boot [zone=z]               a member joins
//	leave boot                         a member goes
//	models boot name[,name…]           its model list
//	report boot [field=value…]         its next record: run wait held pend rate kv gpu limit age ready state flags class
//	advance duration                   time passes; add "quiet" to keep records from coming
//	sent boot [tokens]  first boot [tokens]  done boot outcome [tokens]
//	pick policy n [model=m in=tokens class=c tried=a,b session=s]
//	health [boot…]
//	explain [in=tokens]
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/stories/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			require.NoError(t, err)
			want := string(b)
			got := play(t, want)
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			assert.Equal(t, want, got)
		})
	}
}

// story is the state of one file's play.
type story struct {
	t      *testing.T
	tbl    *Table
	now    time.Time
	rnd    *rand.Rand
	seq    map[uint64]uint32
	last   map[uint64]Report
	policy map[string]Policy
}

func play(t *testing.T, text string) string {
	s := &story{t: t, now: t0, rnd: rand.New(rand.NewPCG(1, 2)), seq: map[uint64]uint32{}, last: map[uint64]Report{}, policy: map[string]Policy{}}
	var out strings.Builder
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, "> "):
			out.WriteString(line)
			out.WriteString(s.command(strings.Fields(line[2:])))
		case strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "":
			out.WriteString(line)
		}
	}
	return out.String()
}

func (s *story) number(x string) int {
	n, err := strconv.Atoi(x)
	require.NoError(s.t, err, "%q", x)
	return n
}

func (s *story) peer(x string) *Peer {
	p := s.tbl.Peer(uint64(s.number(x)))
	require.NotNil(s.t, p, "no member %s", x)
	return p
}

// keyValues splits key=value words.
func keyValues(words []string) map[string]string {
	out := map[string]string{}
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		out[k] = v
	}
	return out
}

func (s *story) command(w []string) string {
	switch w[0] {
	case "fleet":
		s.tbl = NewTable(Member{Boot: 1, Version: AskVersion})
		for i := range s.number(w[1]) {
			boot := uint64(i + 1)
			s.tbl.SetMember(Member{Boot: boot, Version: AskVersion}, s.now)
			s.tbl.SetModels(boot, []Model{{ID: "m"}}, 0, s.now)
			s.report(boot, nil)
		}
	case "member":
		s.tbl.SetMember(Member{Boot: uint64(s.number(w[1])), Zone: keyValues(w[2:])["zone"], Version: AskVersion}, s.now)
	case "leave":
		s.tbl.RemoveMember(uint64(s.number(w[1])), s.now)
	case "models":
		var list []Model
		for _, name := range strings.Split(w[2], ",") {
			list = append(list, Model{ID: name})
		}
		s.tbl.SetModels(uint64(s.number(w[1])), list, 0, s.now)
	case "report":
		return s.report(uint64(s.number(w[1])), keyValues(w[2:]))
	case "advance":
		d, err := time.ParseDuration(w[1])
		require.NoError(s.t, err)
		end := s.now.Add(d)
		for len(w) == 2 && s.now.Add(time.Second).Before(end) { // heartbeats go on
			s.now = s.now.Add(time.Second)
			s.heartbeats()
		}
		s.now = end
		if len(w) == 2 {
			s.heartbeats()
		}
	case "sent", "first":
		n := 0
		if len(w) > 2 {
			n = s.number(w[2])
		}
		if w[0] == "sent" {
			s.peer(w[1]).Sent(n, s.now)
		} else {
			s.peer(w[1]).FirstToken(n, s.now)
		}
	case "done":
		n := 0
		if len(w) > 3 {
			n = s.number(w[3])
		}
		o := Outcome(slices.Index(outcomeNames[:], w[2]))
		require.Less(s.t, int(o), len(outcomeNames), w[2])
		s.peer(w[1]).Done(o, n, s.now)
	case "pick":
		return s.pick(w[1], s.number(w[2]), keyValues(w[3:]))
	case "health":
		var out strings.Builder
		for _, p := range s.tbl.Snapshot().Peers() {
			if len(w) > 1 && !slices.Contains(w[1:], fmt.Sprint(p.Boot())) {
				continue
			}
			h := p.Health(s.now)
			fmt.Fprintf(&out, "%d %s for %v: %s", p.Boot(), h.State, s.now.Sub(h.Since).Round(time.Millisecond), h.Why)
			if !h.EjectedUntil.IsZero() {
				fmt.Fprintf(&out, ", for %.1f s more", h.EjectedUntil.Sub(s.now).Seconds())
			}
			out.WriteByte('\n')
		}
		return out.String()
	case "explain":
		var out strings.Builder
		r := Request{Model: "m"}
		if in := keyValues(w[1:])["in"]; in != "" {
			r.PromptTokens = s.number(in)
		}
		for _, c := range s.tbl.Snapshot().Explain(&r, s.now) {
			x := c.Terms
			fmt.Fprintf(&out, "%d %.4f s: queue %.4f prefill %.4f harm %.4f kv %.4f limit %.4f way %.4f penalty %.1f slowness %.1f slow start %.2f %s\n",
				c.Peer.Boot(), c.Score, x.Queue, x.Prefill, x.Harm, x.KV, x.Limit, x.RoundTrip, x.Penalty, x.Slowness, x.SlowStart, c.Excluded)
		}
		return strings.ReplaceAll(out.String(), " \n", "\n")
	default:
		s.t.Fatalf("unknown command %q", w[0])
	}
	return ""
}

// heartbeats repeats every member's last record.
func (s *story) heartbeats() {
	for boot, r := range s.last {
		if s.tbl.Peer(boot) != nil && !r.Goodbye {
			s.seq[boot]++
			r.Seq = s.seq[boot]
			if r.ReadyFor.OK {
				r.ReadyFor.V += time.Second
			}
			s.last[boot] = r
			s.tbl.Update(r, s.now)
		}
	}
}

func (s *story) report(boot uint64, o map[string]string) string {
	r, ok := s.last[boot]
	if !ok {
		r = ready(boot, 0)
	}
	flags := map[string]Flags{"draining": FlagDraining, "saturated": FlagSaturated, "engine_down": FlagEngineDown, "stale": FlagStale,
		"gpu_trouble": FlagGPUTrouble, "warming": FlagWarming, "suspect": FlagSuspect, "none": 0}
	share := func(v string) Opt[float64] { return Some(float64(s.number(v)) / 100) }
	for k, v := range o {
		switch k {
		case "run":
			r.Running = Some(s.number(v))
		case "wait":
			r.Waiting = Some(s.number(v))
		case "held":
			r.Held = Some(s.number(v))
		case "pend":
			r.PendingTokens = Some(s.number(v))
		case "rate":
			r.PrefillRate = Some(float64(s.number(v)))
		case "limit":
			r.RunLimit = Some(s.number(v))
		case "kv":
			r.KVUsed = share(v)
		case "gpu":
			r.GPUMemoryUsed = share(v)
		case "class":
			r.LowestClass = uint8(s.number(v))
		case "kept":
			kept, err := ParseClasses(strings.Split(v, ","))
			require.NoError(s.t, err)
			r.Kept = kept
		case "goodbye":
			r.Goodbye = true
		case "age", "ready":
			d, err := time.ParseDuration(v)
			require.NoError(s.t, err)
			if k == "age" {
				r.Age = d
			} else {
				r.ReadyFor = Some(d)
			}
		case "state":
			r.State = State(slices.Index(stateNames[:], v))
		case "flags":
			f, ok := flags[v]
			require.True(s.t, ok, v)
			r.Flags = f
		default:
			s.t.Fatalf("unknown field %q", k)
		}
	}
	s.seq[boot]++
	r.Seq = s.seq[boot]
	s.last[boot] = r
	if !s.tbl.Update(r, s.now) {
		return "not applied\n"
	}
	return ""
}

// pick makes n picks, nothing is sent, and tells their shares and reasons.
func (s *story) pick(policy string, n int, o map[string]string) string {
	p := s.policy[policy]
	if p == nil {
		p = mustPolicy(s.t, policy)
		s.policy[policy] = p
	}
	r := Request{Model: "m"}
	if m, ok := o["model"]; ok {
		r.Model = m
	}
	if v := o["in"]; v != "" {
		r.PromptTokens = s.number(v)
	}
	if v := o["class"]; v != "" {
		r.Class = uint8(s.number(v))
	}
	if v := o["session"]; v != "" {
		r.Session = uint64(s.number(v))
	}
	if v := o["tried"]; v != "" {
		for _, b := range strings.Split(v, ",") {
			r.Tried = append(r.Tried, uint64(s.number(b)))
		}
	}
	type row struct {
		boot   uint64
		reason Reason
	}
	count, asks := map[row]int{}, 0
	for range n {
		d := p.Pick(s.tbl.Snapshot(), &r, s.now, s.rnd)
		x := row{reason: d.Reason}
		if d.Peer != nil {
			x.boot = d.Peer.Boot()
		}
		count[x]++
		asks += d.Asks
	}
	var lines []string
	for x, k := range count {
		who := fmt.Sprint(x.boot)
		if x.boot == 0 {
			who = "nobody"
		}
		lines = append(lines, fmt.Sprintf("%-6s %5.1f %% %s\n", who, 100*float64(k)/float64(n), x.reason))
	}
	slices.Sort(lines)
	if asks > 0 {
		lines = append(lines, fmt.Sprintf("asks %.1f a pick\n", float64(asks)/float64(n)))
	}
	return strings.Join(lines, "")
}
