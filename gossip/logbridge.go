package gossip

import (
	"bytes"
	"context"
	"log"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Log keys of this package.
const (
	keyComponent  = "component"  // serf or memberlist
	keySuppressed = "suppressed" // how many lines like this one were left out since the last
	keyMember     = "member"
	keyAddress    = "address"
	keyError      = "error"
)

// logInterval is the shortest time between two warnings or errors of Serf with the same text.
const logInterval = 10 * time.Second

// maxLogTexts bounds the memory of the rate limit; when it is full it starts afresh.
const maxLogTexts = 256

// logBridge takes the lines of Serf's and memberlist's *log.Logger ("[WARN] memberlist: text") and gives them to slog
// with their level. The same warning, whatever the numbers in it, comes at most once in 10 s.
type logBridge struct {
	to        *slog.Logger
	strangers *atomic.Uint64 // lines about packets and streams that no key of ours opens, or of another cluster

	mu   sync.Mutex
	seen map[string]*logText
}

type logText struct {
	last       time.Time
	suppressed int
}

// newLogBridge returns the logger that Serf and memberlist share.
func newLogBridge(to *slog.Logger, strangers *atomic.Uint64) *log.Logger {
	return log.New(&logBridge{to: to, strangers: strangers, seen: make(map[string]*logText)}, "", 0)
}

// ofStranger reports whether a line of memberlist 0.7 is about something that does not come from this cluster. There is one for
// each such packet or stream, and no other place where it can be counted.
func ofStranger(line string) bool {
	for _, s := range [...]string{"Decrypt packet failed", "failed to receive", "unacceptable label", "label header"} {
		if strings.Contains(line, s) {
			return true
		}
	}
	return false
}

func (b *logBridge) Write(p []byte) (int, error) {
	level, line := parseLevel(string(bytes.TrimRight(p, "\n")))
	if level >= slog.LevelWarn && ofStranger(line) {
		b.strangers.Add(1)
	}
	if !b.to.Enabled(context.Background(), level) {
		return len(p), nil
	}
	component, text := "serf", line
	if c, rest, ok := strings.Cut(line, ": "); ok && !strings.Contains(c, " ") {
		component, text = c, rest
	}
	attrs := []slog.Attr{slog.String(keyComponent, component)}
	if level >= slog.LevelWarn {
		n, ok := b.admit(text, time.Now())
		if !ok {
			return len(p), nil
		}
		if n > 0 {
			attrs = append(attrs, slog.Int(keySuppressed, n))
		}
	}
	b.to.LogAttrs(context.Background(), level, text, attrs...)
	return len(p), nil
}

// admit reports whether a text may be logged now, and how many like it were not since the last.
func (b *logBridge) admit(text string, now time.Time) (suppressed int, ok bool) {
	key := logKey(text)
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.seen[key]
	if t == nil {
		if len(b.seen) >= maxLogTexts {
			clear(b.seen)
		}
		b.seen[key] = &logText{last: now}
		return 0, true
	}
	if now.Sub(t.last) < logInterval {
		t.suppressed++
		return 0, false
	}
	suppressed, t.suppressed, t.last = t.suppressed, 0, now
	return suppressed, true
}

// parseLevel cuts the "[LEVEL] " off. Serf's joins and leaves are its INFO; we log those of our members ourselves, so
// its event lines count as debug.
func parseLevel(line string) (slog.Level, string) {
	if !strings.HasPrefix(line, "[") {
		return slog.LevelInfo, line
	}
	name, rest, ok := strings.Cut(line[1:], "] ")
	if !ok {
		return slog.LevelInfo, line
	}
	switch name {
	case "TRACE", "DEBUG":
		return slog.LevelDebug, rest
	case "INFO":
		if strings.HasPrefix(rest, "serf: EventMember") {
			return slog.LevelDebug, rest
		}
		return slog.LevelInfo, rest
	case "WARN":
		return slog.LevelWarn, rest
	case "ERR", "ERROR":
		return slog.LevelError, rest
	}
	return slog.LevelInfo, line
}

// logKey is the text without its digits, so that ports, counts and times do not make each line a new one.
func logKey(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, s)
}
