package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/routing"
	"golang.org/x/term"
)

// runTop shows the replicas live. On a terminal it takes keys; elsewhere, or with --once, it prints one frame.
func runTop(ctx context.Context, p *process, args []string) error {
	f := p.flags("top")
	url := f.String("url", "", "status listener of the agent (default: GRAPEVINE_STATUS_LISTEN on this host)")
	sortBy := f.String("sort", "replica", "column to sort by: "+strings.Join(topNames(), ", "))
	every := f.Duration("every", time.Second, "time between two looks, at least 100ms")
	once := f.Bool("once", false, "print one frame and end")
	if err := p.parse(f, args); err != nil {
		return err
	}
	v := topView{width: 80, height: 24, sort: slices.Index(topNames(), strings.ToLower(*sortBy)), colour: p.terminal}
	if v.sort < 0 || *every < 100*time.Millisecond {
		return fmt.Errorf("top: --sort is one of %s, --every at least 100ms: %w", strings.Join(topNames(), ", "), errUsage)
	}
	c, err := newConsoleClient(*url, p.environ)
	if err != nil {
		return err
	}
	fetch := func() (*agent.Status, error) {
		b, err := c.do(ctx, http.MethodGet, "/status", 3*time.Second)
		if err != nil {
			return nil, err
		}
		s := new(agent.Status)
		return s, json.Unmarshal(b, s)
	}
	if v.status, err = fetch(); err != nil {
		return err
	}
	if *once || !p.terminal || !term.IsTerminal(int(os.Stdin.Fd())) {
		v.height = len(v.status.Peers) + len(v.status.Warnings) + 8
		if !p.terminal {
			v.width = 160
		} else if w, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil {
			v.width = w
		}
		fmt.Fprintln(p.out, strings.Join(v.lines(), "\n"))
		return nil
	}
	return v.live(ctx, p, fetch, *every)
}

// live redraws until q, end of input, or a signal. The terminal is put back as it was.
func (v *topView) live(ctx context.Context, p *process, fetch func() (*agent.Status, error), every time.Duration) error {
	ctx, stop := untilSignal(ctx, p)
	defer stop()
	in := int(os.Stdin.Fd())
	old, err := term.MakeRaw(in)
	if err != nil {
		return err
	}
	defer func() { _ = term.Restore(in, old) }() // nothing else could be done
	fmt.Fprint(p.out, "\x1b[?1049h\x1b[?25l")
	defer fmt.Fprint(p.out, "\x1b[?25h\x1b[?1049l")
	keys := make(chan []byte)
	go readKeys(os.Stdin, keys, ctx.Done()) // ends with the process at the latest: a read from a terminal cannot be broken off
	tick := time.NewTicker(every)
	defer tick.Stop()
	size := time.NewTicker(250 * time.Millisecond)
	defer size.Stop()
	for {
		if w, h, err := term.GetSize(int(os.Stdout.Fd())); err == nil {
			v.width, v.height = w, h
		}
		fmt.Fprint(p.out, "\x1b[H"+strings.Join(v.lines(), "\x1b[K\r\n")+"\x1b[K\x1b[J")
		select {
		case <-ctx.Done():
			return nil
		case k, ok := <-keys:
			if !ok || v.key(string(k)) {
				return nil
			}
		case <-size.C: // a resized terminal is drawn anew
		case <-tick.C:
			if v.paused {
				continue
			}
			if s, err := fetch(); err != nil {
				v.lost = err.Error()
			} else {
				v.status, v.lost = s, ""
			}
		}
	}
}

func readKeys(r io.Reader, keys chan<- []byte, done <-chan struct{}) {
	defer close(keys)
	for {
		b := make([]byte, 16)
		n, err := r.Read(b)
		if err != nil {
			return
		}
		select {
		case keys <- b[:n]:
		case <-done:
			return
		}
	}
}

// topView is what one frame is made of.
type topView struct {
	status        *agent.Status
	lost          string // why the newest look failed
	width, height int    // of the terminal, in cells
	sort          int    // index into topColumns
	reverse       bool
	paused        bool
	skip          int // replicas scrolled past
	colour        bool
}

// key takes one key press and reports whether it ends the view.
func (v *topView) key(k string) (end bool) {
	switch k {
	case "q", "Q", "\x03", "\x04":
		return true
	case "s", "\x1b[C":
		v.sort, v.skip = (v.sort+1)%len(topColumns()), 0
	case "S", "\x1b[D":
		v.sort, v.skip = (v.sort+len(topColumns())-1)%len(topColumns()), 0
	case "r":
		v.reverse = !v.reverse
	case " ":
		v.paused = !v.paused
	case "j", "\x1b[B":
		v.skip++
	case "k", "\x1b[A":
		v.skip--
	case "\x1b[6~":
		v.skip += max(1, v.height/2)
	case "\x1b[5~":
		v.skip -= max(1, v.height/2)
	case "g", "\x1b[H":
		v.skip = 0
	case "G", "\x1b[F":
		v.skip = len(v.status.Peers)
	}
	v.skip = min(max(v.skip, 0), max(0, len(v.status.Peers)-1))
	return false
}

// topColumn is one column. A narrow terminal loses those with the highest rank first.
type topColumn struct {
	name string
	rank int
	cell func(*agent.PeerStatus) string
	less func(a, b *agent.PeerStatus) int // biggest first where that is what one looks for
}

func topColumns() []topColumn {
	number := func(f func(*agent.PeerStatus) routing.Opt[int]) func(a, b *agent.PeerStatus) int {
		return func(a, b *agent.PeerStatus) int { return cmp.Compare(f(b).Or(-1), f(a).Or(-1)) }
	}
	share := func(f func(*agent.PeerStatus) routing.Opt[float64]) func(a, b *agent.PeerStatus) int {
		return func(a, b *agent.PeerStatus) int { return cmp.Compare(f(b).Or(-1), f(a).Or(-1)) }
	}
	running := func(p *agent.PeerStatus) routing.Opt[int] { return p.Running }
	waiting := func(p *agent.PeerStatus) routing.Opt[int] { return p.Waiting }
	held := func(p *agent.PeerStatus) routing.Opt[int] { return p.Held }
	pending := func(p *agent.PeerStatus) routing.Opt[int] { return p.PendingTokens }
	kv := func(p *agent.PeerStatus) routing.Opt[float64] { return p.KVUsage }
	gpu := func(p *agent.PeerStatus) routing.Opt[float64] { return p.GPUMemoryUsage }
	ttft := func(p *agent.PeerStatus) routing.Opt[float64] { return p.PredictedTTFTMS }
	percent := func(x routing.Opt[float64]) string { x.V *= 100; return opt(x, "%.0f%%") }
	return []topColumn{
		{"replica", 0, func(p *agent.PeerStatus) string {
			if p.Self {
				return p.Node + " *"
			}
			return p.Node
		}, func(a, b *agent.PeerStatus) int { return cmp.Compare(a.Node, b.Node) }},
		{"state", 1, func(p *agent.PeerStatus) string { return p.State }, func(a, b *agent.PeerStatus) int { return cmp.Compare(a.State, b.State) }},
		{"run", 2, func(p *agent.PeerStatus) string { return opt(p.Running, "%d") }, number(running)},
		{"wait", 3, func(p *agent.PeerStatus) string { return opt(p.Waiting, "%d") }, number(waiting)},
		{"held", 6, func(p *agent.PeerStatus) string { return opt(p.Held, "%d") }, number(held)},
		{"tokens", 8, func(p *agent.PeerStatus) string { return opt(p.PendingTokens, "%d") }, number(pending)},
		{"kv", 4, func(p *agent.PeerStatus) string { return percent(p.KVUsage) }, share(kv)},
		{"gpu", 9, func(p *agent.PeerStatus) string { return percent(p.GPUMemoryUsage) }, share(gpu)},
		{"first", 5, func(p *agent.PeerStatus) string {
			if !p.PredictedTTFTMS.OK {
				return "-"
			}
			return milliseconds(p.PredictedTTFTMS.V)
		}, share(ttft)},
		{"here", 7, func(p *agent.PeerStatus) string { return fmt.Sprint(p.InflightFromHere) }, func(a, b *agent.PeerStatus) int { return cmp.Compare(b.InflightFromHere, a.InflightFromHere) }},
		{"age", 10, func(p *agent.PeerStatus) string {
			if p.Self {
				return "-"
			}
			return opt(p.AgeMS, "%d ms")
		}, func(a, b *agent.PeerStatus) int { return cmp.Compare(b.AgeMS.Or(-1), a.AgeMS.Or(-1)) }},
		{"zone", 11, func(p *agent.PeerStatus) string { return p.Zone }, func(a, b *agent.PeerStatus) int { return cmp.Compare(a.Zone, b.Zone) }},
		{"why", 12, func(p *agent.PeerStatus) string {
			if p.State == "ready" {
				return strings.Join(p.Flags, ", ")
			}
			return strings.Join(append(nonEmpty(p.Why), p.Flags...), ", ")
		}, func(a, b *agent.PeerStatus) int { return cmp.Compare(b.Why, a.Why) }},
	}
}

func nonEmpty(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}

func topNames() (names []string) {
	for _, c := range topColumns() {
		names = append(names, c.name)
	}
	return names
}

// lines renders the frame: at most height lines of at most width cells.
func (v *topView) lines() []string {
	s := v.status
	out := v.head(s)
	peers := slices.Clone(s.Peers)
	by := topColumns()[v.sort].less
	slices.SortStableFunc(peers, func(a, b agent.PeerStatus) int {
		if v.reverse {
			return by(&b, &a)
		}
		return by(&a, &b)
	})
	room := max(1, v.height-len(out)-2) // the table's head and the keys
	v.skip = min(v.skip, max(0, len(peers)-room))
	shown := peers[v.skip:min(len(peers), v.skip+room)]
	out = append(out, v.table(peers, shown)...)
	for len(out) < v.height-1 && v.height < 1000 && len(shown) == room {
		out = append(out, "")
	}
	foot := fmt.Sprintf("s sort (%s)  r turn  space %s  j/k scroll  q end", topNames()[v.sort], map[bool]string{false: "pause", true: "go on"}[v.paused])
	if len(shown) < len(peers) {
		foot = fmt.Sprintf("%d-%d of %d  ", v.skip+1, v.skip+len(shown), len(peers)) + foot
	}
	out = append(out[:min(len(out), max(1, v.height-1))], cut(foot, v.width))
	return out
}

// head is what stands above the table: the own agent, sums, and as many warnings as have room.
func (v *topView) head(s *agent.Status) []string {
	count := map[string]int{}
	var run, wait, held int
	for _, p := range s.Peers {
		count[p.State]++
		run += p.Running.Or(0)
		wait += p.Waiting.Or(0)
		held += p.Held.Or(0)
	}
	title := fmt.Sprintf("%s  %s  up %s", s.Node, s.State, (time.Duration(s.UptimeMS) * time.Millisecond).Truncate(time.Second))
	if v.lost != "" {
		title = "NO ANSWER  " + v.lost
	}
	sums := fmt.Sprintf("%d replicas, %d ready; running %d, waiting %d, held %d; from here %d ended, %d forwarded, %d refused", len(s.Peers), count["ready"], run, wait, held,
		s.Picks.Total, s.Picks.Forwarded, s.Picks.Failed)
	out := []string{paint(cut(title, v.width), map[bool]string{true: s.State, false: "gone"}[v.lost == ""], v.colour), cut(sums, v.width)}
	for i, w := range s.Warnings {
		if room := max(1, v.height/4); i == room-1 && len(s.Warnings) > room {
			out = append(out, paint(cut(fmt.Sprintf("! and %d more warnings", len(s.Warnings)-i), v.width), "warming", v.colour))
			break
		}
		out = append(out, paint(cut("! "+w, v.width), "warming", v.colour))
	}
	return out
}

// table lays out what fits into the width; all decides how wide columns are, so that scrolling moves nothing.
func (v *topView) table(all, shown []agent.PeerStatus) []string {
	cols := topColumns()
	width := make([]int, len(cols))
	for i, c := range cols {
		width[i] = len(c.name)
		for j := range all {
			width[i] = max(width[i], utf8.RuneCountInString(c.cell(&all[j])))
		}
	}
	width[0] = min(width[0], max(1, v.width))
	keep := make([]bool, len(cols))
	left := v.width - width[0]
	for rank := range len(cols) {
		i := slices.IndexFunc(cols, func(c topColumn) bool { return c.rank == rank })
		switch need := width[i] + 2; {
		case rank == 0:
			keep[i] = true
		case i == len(cols)-1 && left > len("why")+2: // the last one may be cut
			keep[i], left = true, 0
		case need <= left:
			keep[i] = true
			left -= need
		default:
			left = 0 // no lesser column slips in behind a gap
		}
	}
	row := func(cell func(i int) string, state string) string {
		var b strings.Builder
		used := 0
		for i, c := range cols {
			if !keep[i] || used >= v.width {
				continue
			}
			text := cell(i)
			pad := strings.Repeat(" ", max(0, width[i]-utf8.RuneCountInString(text)))
			switch {
			case i == 0:
				text = cut(text, width[0]) + pad
			case i == len(cols)-1:
				text = cut(text, v.width-used)
			case i >= 2 && c.name != "zone":
				text = pad + text
			default:
				text += pad
			}
			used += utf8.RuneCountInString(text) + 2
			if c.name == "state" && state != "" {
				text = paint(text, state, v.colour)
			}
			if b.Len() > 0 {
				b.WriteString("  ")
			}
			b.WriteString(text)
		}
		return strings.TrimRight(b.String(), " ")
	}
	out := []string{row(func(i int) string {
		if i == v.sort {
			return strings.ToUpper(cols[i].name)
		}
		return cols[i].name
	}, "")}
	for j := range shown {
		out = append(out, row(func(i int) string { return cols[i].cell(&shown[j]) }, shown[j].State))
	}
	return out
}

// cut shortens text to width cells, with a mark where something is missing.
func cut(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	r := []rune(text)
	if width < 1 {
		return ""
	}
	return string(r[:width-1]) + "…"
}
