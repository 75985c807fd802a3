package agent

import (
	"bytes"
	"cmp"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

//go:embed page
var pageFiles embed.FS

var pageTemplate = template.Must(template.New("page.html").Funcs(template.FuncMap{
	"opt": func(v any) string {
		switch x := v.(type) {
		case routing.Opt[int]:
			return show(x, "%d")
		case routing.Opt[int64]:
			return show(x, "%d")
		case routing.Opt[float64]:
			return show(x, "%.0f")
		}
		return fmt.Sprint(v)
	},
	"percent": func(x routing.Opt[float64]) string { x.V *= 100; return show(x, "%.0f %%") },
	"width":   func(x routing.Opt[float64]) float64 { return min(max(x.V, 0), 1) * 100 },
	"size": func(x routing.Opt[uint64]) string {
		return show(routing.Opt[float64]{V: float64(x.V) / (1 << 30), OK: x.OK}, "%.1f GiB")
	},
	"uptime": func(ms int64) string { return (time.Duration(ms) * time.Millisecond).Truncate(time.Second).String() },
	"ms":     func(ms float64) string { return fmt.Sprintf("%.0f", ms) },
	"clock":  func(t time.Time) string { return t.UTC().Format("15:04:05.0") },
	"mark":   stateMark,
	"short":  shortNode,
}).ParseFS(pageFiles, "page/page.html"))

// show prints a value, or a dash if it is unknown: unknown is not zero.
func show[T any](x routing.Opt[T], format string) string {
	if !x.OK {
		return "–"
	}
	return fmt.Sprintf(format, x.V)
}

// stateMark is a sign beside the colour of a state, for those who do not see colours.
func stateMark(state string) string {
	switch state {
	case "ready":
		return "●"
	case "suspect", "ejected", "gone":
		return "✕"
	}
	return "◐"
}

// shortNode is a node's name without the part that is unique for each start.
func shortNode(node string) string {
	if name, boot, ok := strings.Cut(node, "."); ok && len(boot) == 8 {
		return name
	}
	return node
}

const (
	pagePicks = 20 // recent picks on the page
	crowd     = 40 // replicas from which the map is dense, and the table folded
	pageFlows = 12 // rows of flows
)

// pageData is what the page shows: the status, and what is made of it.
type pageData struct {
	Status
	States []stateCount
	Sum    struct{ Running, Waiting, Held, PendingTokens int }
	Dense  bool
	Recent []proxy.PickRecord
	Flows  []flow
	common string
}

// Tile is a node's name on the dense map: without what all names begin with.
func (d *pageData) Tile(node string) string { return strings.TrimPrefix(shortNode(node), d.common) }

// commonPrefix is what all names begin with, up to a separator; "" for a single one.
func commonPrefix(peers []PeerStatus) string {
	if len(peers) < 2 {
		return ""
	}
	common := shortNode(peers[0].Node)
	for _, p := range peers {
		name := shortNode(p.Node)
		n := 0
		for n < len(common) && n < len(name)-1 && common[n] == name[n] {
			n++
		}
		common = common[:n]
	}
	return common[:strings.LastIndexAny(common, "-.")+1]
}

type stateCount struct {
	State string
	N     int
}

// flow is where the last requests went from here, or that they came from others.
type flow struct {
	Name     string
	Self     bool
	Requests int     // of those that the agent remembers
	Share    float64 // of them, 0..100
	Inflight int
	TTFTMS   routing.Opt[float64] // mean
}

func (c *console) pageData() *pageData {
	d := &pageData{Status: c.status()}
	d.common = commonPrefix(d.Peers)
	d.Dense = len(d.Peers) > crowd
	n := map[string]int{}
	for _, p := range d.Peers {
		n[p.State]++
		d.Sum.Running += p.Running.Or(0)
		d.Sum.Waiting += p.Waiting.Or(0)
		d.Sum.Held += p.Held.Or(0)
		d.Sum.PendingTokens += p.PendingTokens.Or(0)
	}
	for s, k := range n {
		d.States = append(d.States, stateCount{s, k})
	}
	slices.SortFunc(d.States, func(a, b stateCount) int {
		return cmp.Or(cmp.Compare(b.N, a.N), cmp.Compare(a.State, b.State))
	})
	recent, _ := c.picks("").([]proxy.PickRecord)
	d.Flows = flows(d.Peers, recent)
	d.Recent = recent[:min(len(recent), pagePicks)]
	return d
}

// flows sums up where the requests of clients went whose records are still there.
func flows(peers []PeerStatus, recent []proxy.PickRecord) []flow {
	type sum struct {
		n, first int
		ttft     float64
	}
	to := map[string]*sum{}
	total := 0
	for _, r := range recent {
		if r.Role != "entry" || len(r.Attempts) == 0 {
			continue
		}
		node := r.Attempts[len(r.Attempts)-1].Node
		s := to[node]
		if s == nil {
			s = &sum{}
			to[node] = s
		}
		total++
		s.n++
		if r.TTFTMS > 0 {
			s.first++
			s.ttft += r.TTFTMS
		}
	}
	var out []flow
	for _, p := range peers {
		f := flow{Name: p.Node, Self: p.Self, Inflight: p.InflightFromHere}
		if s := to[p.Node]; s != nil {
			f.Requests, f.Share = s.n, 100*float64(s.n)/float64(total)
			if s.first > 0 {
				f.TTFTMS = routing.Some(s.ttft / float64(s.first))
			}
		}
		if f.Requests > 0 || f.Inflight > 0 {
			out = append(out, f)
		}
	}
	slices.SortStableFunc(out, func(a, b flow) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(b.Inflight, a.Inflight))
	})
	return out[:min(len(out), pageFlows)]
}

// page renders the whole page; it is complete without JavaScript.
func (c *console) page(w http.ResponseWriter, r *http.Request) {
	var b bytes.Buffer
	if err := pageTemplate.ExecuteTemplate(&b, "page.html", c.pageData()); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(b.Bytes()) // the client hung up
}

// maxSubscribers bounds the open live pages; each costs one rendering a second.
const maxSubscribers = 64

// events streams the page's content again and again as server-sent events, until the client goes or the server closes.
func (c *console) events(w http.ResponseWriter, r *http.Request) {
	if c.subscribers.Add(1) > maxSubscribers {
		c.subscribers.Add(-1)
		http.Error(w, "too many open pages", http.StatusServiceUnavailable)
		return
	}
	defer c.subscribers.Add(-1)
	w.Header().Set("Content-Type", "text/event-stream")
	rc := http.NewResponseController(w)
	tick := time.NewTicker(c.every)
	defer tick.Stop()
	for {
		var b bytes.Buffer
		if err := pageTemplate.ExecuteTemplate(&b, "content", c.pageData()); err != nil {
			return
		}
		out := []byte("event: content\n")
		for line := range bytes.Lines(b.Bytes()) {
			if line = bytes.TrimSpace(line); len(line) > 0 {
				out = append(append(append(out, "data: "...), line...), '\n')
			}
		}
		_ = rc.SetWriteDeadline(time.Now().Add(10 * time.Second)) // a reader that stalls is let go
		if _, err := w.Write(append(out, '\n')); err != nil || rc.Flush() != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
	}
}
