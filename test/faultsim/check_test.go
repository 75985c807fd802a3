package faultsim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

// run is one run of a request at an engine.
type run struct {
	engine int
	enginesim.Entry
}

func (r run) from() time.Time { return time.Unix(0, r.Received) }
func (r run) to() time.Time   { return time.Unix(0, r.End) }

// notRun are outcomes of requests that an engine refused: nothing was computed.
func (r run) notRun() bool {
	switch r.Outcome {
	case "refused", "error500", "busy", "shutdown", "loading":
		return true
	}
	return false
}

// outcome names what a client got, for the counts.
func (a *answer) outcome() string {
	switch {
	case !a.gaveUp.IsZero():
		return "hung up"
	case a.late:
		return "late"
	case a.whole:
		return "whole"
	case a.status >= 400 && a.errBody != "":
		return "error"
	case a.errBody != "":
		return "broken off"
	case a.entry < 0:
		return "nobody listens"
	}
	return "cut"
}

// checkAnswers holds every answer against its request.
func (f *fleet) checkAnswers(answers []*answer) {
	for _, a := range answers {
		q := a.q
		switch o := a.outcome(); o {
		case "late":
			f.violation("%s: no end within %v (entered at agent %d, stream %v)", q.id, patience, a.entry, q.stream)
			continue
		case "whole":
			if want := f.expected(q); a.text != want {
				f.violation("%s: the text is not the uninterrupted one\n   got  %q\n   want %q", q.id, a.text, want)
			}
			if a.used >= 0 && a.used != q.max {
				f.violation("%s: usage says %d tokens, it were %d", q.id, a.used, q.max)
			}
		case "error":
			if !honest(a.errBody) {
				f.violation("%s: status %d with %q", q.id, a.status, a.errBody)
			}
			if a.reason != "" && (a.status == 429 || a.status == 503) && a.retry == "" {
				f.violation("%s: status %d (%s) without Retry-After", q.id, a.status, a.reason)
			}
		case "cut", "nobody listens":
			if !f.lostEntry(a) {
				f.violation("%s: cut without a word at agent %d, which lives: status %d, %v", q.id, a.entry, a.status, a.err)
			}
		}
		if a.odd != "" {
			f.violation("%s: %s", q.id, a.odd)
		}
		if a.text != "" && !a.whole {
			if want := f.expected(q); !strings.HasPrefix(want, a.text) {
				f.violation("%s: the text is no beginning of the uninterrupted one\n   got  %q\n   want %q", q.id, a.text, want)
			}
		}
		f.checkWaits(a)
		if q.deadline > 0 && a.gaveUp.IsZero() && a.ended.Sub(a.began) > q.deadline+100*time.Millisecond && !f.stalled(a.began, a.ended) {
			f.violation("%s: ended %v after its arrival, its deadline was %v", q.id, a.ended.Sub(a.began), q.deadline)
		}
	}
}

// cause is why a request got an error, for the counts.
func (a *answer) cause() string {
	var e struct{ Error struct{ Code any } }
	_ = json.Unmarshal([]byte(a.errBody), &e)
	if a.reason != "" {
		return fmt.Sprintf("%s: %s", a.outcome(), a.reason)
	}
	return fmt.Sprintf("%s: %d %v", a.outcome(), a.status, e.Error.Code)
}

// Longest waits that the agents' limits allow where the network works: an attempt may wait for the gate and then for its
// first byte, there are three attempts, and pauses between them.
const (
	firstMost = 3*(queueFor+firstByte) + 2*time.Second
	gapMost   = idle + 3*(queueFor+idle) + 2*time.Second
)

// checkWaits looks whether something waited past its limit.
func (f *fleet) checkWaits(a *answer) {
	if a.q.slow > 0 || !a.gaveUp.IsZero() || f.disturbed(a.began.Add(-keepalive), a.ended) {
		return
	}
	first := a.ended.Sub(a.began)
	if !a.firstAt.IsZero() {
		first = a.firstAt.Sub(a.began)
		gap := max(a.gap, a.ended.Sub(a.lastAt))
		f.longest["gap"] = max(f.longest["gap"], gap)
		if gap > gapMost {
			f.violation("%s: %v of silence in a stream", a.q.id, gap)
		}
	}
	if a.q.stream || a.status != 200 {
		f.longest["first"] = max(f.longest["first"], first)
		if first > firstMost {
			f.violation("%s: %v without a byte", a.q.id, first)
		}
	}
}

// honest reports whether an error body is one in OpenAI's shape.
func honest(body string) bool {
	var e struct {
		Error   *struct{ Message string }
		Message string // SGLang's own shape
	}
	return json.Unmarshal([]byte(body), &e) == nil && (e.Message != "" || e.Error != nil && e.Error.Message != "")
}

// lostEntry reports whether the agent at which a request entered was killed or ended while it was under way.
func (f *fleet) lostEntry(a *answer) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.noise {
		if d.kind == "gone" && (a.entry < 0 || d.host == a.entry) && d.from.Before(a.ended.Add(time.Millisecond)) && d.to.After(a.began) {
			return true
		}
	}
	return false
}

// stalled reports whether an agent stood still meanwhile.
func (f *fleet) stalled(from, to time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.noise {
		if d.kind == "stall" && d.from.Before(to) && d.to.After(from) {
			return true
		}
	}
	return false
}

// once is how long two runs of a request may overlap: until the end of the first has been noticed (design 6.7).
const once = time.Second

// freed is within which time a hang-up frees the engine.
const freed = 200 * time.Millisecond

// checkRuns looks for requests that ran twice at once, for nobody, or too often, by the engines' journals. It returns how
// many runs overlapped while a network was cut or an agent stood still, so that it cannot be told.
func (f *fleet) checkRuns(answers []*answer) (orphaned int) {
	runs := map[string][]run{}
	for i, h := range f.hosts {
		for _, e := range h.engine.Journal() {
			if e.Outcome == "running" {
				if e.RequestID != "" {
					f.violation("engine %d still runs %s", i, e.RequestID)
				}
				continue
			}
			runs[e.RequestID] = append(runs[e.RequestID], run{i, e})
		}
	}
	for _, a := range answers {
		list := runs[a.q.id]
		slices.SortFunc(list, func(x, y run) int { return cmp.Compare(x.Received, y.Received) })
		for i, x := range list {
			for _, y := range list[:i] {
				if y.to().Sub(x.from()) <= once || x.to().Sub(x.from()) <= once {
					continue
				}
				if f.disturbed(x.from().Add(-keepalive), x.to()) {
					orphaned++
					continue
				}
				f.violation("%s ran at engine %d (%s) and at engine %d (%s) at once, for %v", a.q.id, y.engine, f.span(y), x.engine, f.span(x),
					min(x.End, y.End)-x.Received)
			}
		}
		if !a.gaveUp.IsZero() {
			for _, x := range list {
				if late := x.to().Sub(a.gaveUp); late > freed && !f.disturbed(a.gaveUp.Add(-keepalive), x.to()) {
					f.violation("%s: its client hung up at %.3f, engine %d worked for it %s (%s), %v longer", a.q.id, a.gaveUp.Sub(f.start).Seconds(), x.engine, f.span(x), x.Outcome, late)
				}
			}
		}
		if a.text == "" && !a.q.idempotent {
			where := map[int]bool{}
			for _, x := range list {
				if !x.notRun() {
					where[x.engine] = true
				}
			}
			if len(where) > 2 {
				f.violation("%s was given to %d engines, which is more than one replay", a.q.id, len(where))
			}
		}
	}
	return orphaned
}

func (f *fleet) span(r run) string {
	return r.from().Sub(f.start).Round(time.Millisecond).String() + " to " + r.to().Sub(f.start).Round(time.Millisecond).String() + " " + r.Outcome
}

// checkRest looks what agents and engines still count, when nothing has been under way for long.
func (f *fleet) checkRest() {
	for i, h := range f.hosts {
		if a := h.running(); a != nil {
			for _, l := range a.Leftovers() {
				f.violation("agent %d at rest: %s", i, l)
			}
		}
		var s enginesim.Stats
		for range 50 { // the agent's own probe may be under way
			if s = h.engine.Stats(); s.Calls == 0 && s.Running+s.Waiting == 0 {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if s.Calls != 0 || s.Running+s.Waiting != 0 {
			f.violation("engine %d at rest: %d calls, %d running, %d waiting", i, s.Calls, s.Running, s.Waiting)
		}
	}
}

// checkEnd looks for connections and goroutines that outlive everything.
func (f *fleet) checkEnd() {
	for _, c := range f.net.open() {
		f.violation("left open: connection %s", c)
	}
	for _, g := range bubble() {
		f.violation("left running: %s", g)
	}
}

// bubble lists the goroutines of this bubble but the caller.
func bubble() (list []string) {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	all := strings.Split(string(buf), "\n\n")
	_, own, ok := strings.Cut(strings.SplitN(all[0], "\n", 2)[0], "synctest bubble ")
	if !ok {
		return nil
	}
	own = "synctest bubble " + own[:strings.IndexAny(own, "],")]
	for _, g := range all[1:] {
		head, _, _ := strings.Cut(g, "\n")
		if strings.Contains(g, "testing/synctest.Test(") || strings.Contains(g, "testing.testingSynctestTest(") || strings.Contains(g, "testing/synctest.testingSynctestTest(") {
			continue // the bubble's own two
		}
		if strings.Contains(head, own+"]") || strings.Contains(head, own+",") {
			list = append(list, g)
		}
	}
	return list
}
