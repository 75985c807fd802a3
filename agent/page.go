package agent

import (
	"bytes"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"time"

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
}).ParseFS(pageFiles, "page/page.html"))

// show prints a value, or a dash if it is unknown: unknown is not zero.
func show[T any](x routing.Opt[T], format string) string {
	if !x.OK {
		return "–"
	}
	return fmt.Sprintf(format, x.V)
}

// page renders the whole page; it is complete without JavaScript.
func (c *console) page(w http.ResponseWriter, r *http.Request) {
	var b bytes.Buffer
	if err := pageTemplate.ExecuteTemplate(&b, "page.html", c.status()); err != nil {
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
		if err := pageTemplate.ExecuteTemplate(&b, "content", c.status()); err != nil {
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
