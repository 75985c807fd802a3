package engine

import (
	"slices"
	"time"
)

// staleAfter is the age at which a value stops being known. LMDeploy itself refreshes its gauges every 10 s.
const staleAfter = 10 * time.Second

// absentFor is how long a page that the engine does not have is not asked for again.
const absentFor = 30 * time.Second

// state is a table in use. All but the table belongs to Read.
type state struct {
	table     *Table
	pages     []*pageState
	compiled  []compiled // in the order of preference
	results   []result   // of each compiled entry
	adapters  Adapters
	adapterAt time.Time
	adapter   string // raw labels behind adapters
	blind     int    // reads in a row that found nothing
}

// pageState is a page of the table and what became of it.
type pageState struct {
	page    Page
	paths   []string
	path    string // the one that works, "" until known
	scanner *scanner
	entries []int // indices into state.compiled
	tried   time.Time
	at      time.Time // last success
	err     error     // of the last attempt
	absent  bool      // the engine has no such page
	rested  bool      // at the last success nothing ran or waited
}

// newState compiles a table's entries behind the custom ones.
func (r *Reader) newState(t *Table) *state {
	st := &state{table: t}
	if r.res.off {
		return st
	}
	entries := slices.Concat(r.res.custom.Entries, t.Entries)
	for _, p := range slices.Concat(t.Pages, r.res.custom.Pages) {
		used := slices.ContainsFunc(entries, func(e Entry) bool { return e.Page == p.Name })
		if !used || st.page(p.Name) != nil {
			continue
		}
		ps := &pageState{page: p, paths: p.Paths, scanner: newScanner()}
		if p.Name == mainPage && r.res.metrics != nil {
			ps.paths = []string{r.res.metrics.String()}
		}
		st.pages = append(st.pages, ps)
	}
	if p := st.page(mainPage); p != nil && t.Adapters != "" {
		p.scanner.addInfo(t.Adapters)
	}
	for i := range entries {
		p := st.page(entries[i].Page)
		if p == nil {
			continue
		}
		c := compiled{entry: &entries[i], page: p}
		for j := range entries[i].Terms {
			term := &entries[i].Terms[j]
			var wants []int
			for _, name := range term.Names {
				wants = append(wants, p.scanner.add(name, term))
			}
			c.wants = append(c.wants, wants)
		}
		p.entries = append(p.entries, len(st.compiled))
		st.compiled = append(st.compiled, c)
		st.results = append(st.results, result{why: whyNotRead, metric: firstName(&entries[i])})
	}
	return st
}

func firstName(e *Entry) string {
	for _, t := range e.Terms {
		if len(t.Names) > 0 {
			return t.Names[0]
		}
	}
	return ""
}

func (st *state) page(name string) *pageState {
	for _, p := range st.pages {
		if p.page.Name == name {
			return p
		}
	}
	return nil
}

// says tells whether some page knows the field, and its value is above zero, or not above it.
func (st *state) says(f Field, above bool) bool {
	for i := range st.compiled {
		if res := &st.results[i]; st.compiled[i].entry.Field == f && res.ok && !st.compiled[i].page.page.Wakes && res.value > 0 == above {
			return true
		}
	}
	return false
}

// rests tells whether nothing runs or waits.
func (st *state) rests() bool { return st.says(FieldRunning, false) && st.says(FieldWaiting, false) }

// paths lists the pages that Read and Health call.
func (t *Table) paths() []string {
	var out []string
	for _, p := range t.Pages {
		out = append(out, p.Paths...)
	}
	for _, p := range t.Health {
		out = append(out, p.Path)
	}
	return out
}

// compose builds the reading from the results of all pages.
func (st *state) compose(now time.Time) Reading {
	var rd Reading
	var sources [numFields]source
	for f := range sources {
		sources[f].why = whyNoEntry
	}
	for i := range st.compiled {
		f := st.compiled[i].entry.Field
		if sources[f].ok {
			continue
		}
		s := st.compiled[i].page.source(st.results[i], now)
		if s.weight() > sources[f].weight() {
			sources[f] = s
		}
	}
	for f := range numFields {
		rd.set(f, sources[f])
	}
	if st.adapters.Known && now.Sub(st.adapterAt) < staleAfter {
		rd.Adapters = st.adapters
	}
	for _, f := range []Field{FieldRunning, FieldWaiting, FieldKVUsed} {
		if s := &sources[f]; s.ok && (rd.At.IsZero() || s.at.Before(rd.At)) {
			rd.At = s.at
		}
	}
	if rd.At.IsZero() {
		for _, p := range st.pages {
			if p.at.After(rd.At) {
				rd.At = p.at
			}
		}
	}
	return rd
}

// source turns the result of an entry into a value with its origin.
func (p *pageState) source(res result, now time.Time) source {
	path := p.path
	if path == "" && len(p.paths) > 0 {
		path = p.paths[0]
	}
	s := source{page: path, metric: res.metric, at: p.at}
	switch {
	case p.at.IsZero() && p.err != nil:
		s.why, s.detail, s.hint = whyPage, p.err.Error(), p.page.Hint != ""
	case p.at.IsZero():
		s.why = whyNotRead
	case now.Sub(p.at) >= staleAfter+p.page.Every:
		s.why = whyStale
	case !res.ok:
		s.why = res.why
	default:
		s.value, s.ok = res.value, true
	}
	return s
}

// weight orders the reasons of alternatives: what an operator can act on first.
func (s source) weight() int {
	switch s.why {
	case whyKnown:
		return 9
	case whyNotFinite, whyRange, whyZeroDivisor, whyStale:
		return 5
	case whyPage:
		if s.hint {
			return 4
		}
		return 2
	case whyAbsent:
		return 3
	case whyNotRead:
		return 1
	default:
		return 0
	}
}
