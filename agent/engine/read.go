package engine

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Read fetches the engine's pages and returns what they say. On an error the reading is the last one, marked Stale,
// with values of more than 10 s ago unknown: [ErrTimeout] means loaded, [ErrRefused] down. Values from before a
// refused connection are dropped at once.
func (r *Reader) Read(ctx context.Context) (Reading, error) {
	if r.err != nil {
		return Reading{}, r.err
	}
	r.reading.Lock()
	defer r.reading.Unlock()
	start := time.Now()
	st, err := r.ensure(ctx)
	if err != nil {
		return r.unread(err), err
	}
	var first error // of the first page, which carries the load where there are several
	answered := false
	for _, p := range st.pages {
		if p.absent && start.Sub(p.tried) < absentFor {
			if first == nil {
				first = p.err
			}
			continue
		}
		if p.page.Wakes && (st.says(FieldAsleep, true) || p.rested && st.rests()) {
			if !p.at.IsZero() {
				p.at = start
			}
			continue
		}
		if answered && p.page.Every > 0 && start.Sub(p.tried) < p.page.Every {
			continue
		}
		p.tried = start
		err := r.readPage(ctx, st, p)
		if err == nil {
			answered = true
			continue
		}
		if first == nil {
			first = err
		}
		if errors.Is(err, ErrRefused) || errors.Is(err, ErrTimeout) {
			break // the other pages are behind the same door
		}
	}
	if answered {
		first = nil
	}
	if first != nil {
		first = fmt.Errorf("read %s: %w", st.table.Kind, first)
	}
	return r.finish(st, start, first), first
}

// readPage fetches and reads one page.
func (r *Reader) readPage(ctx context.Context, st *state, p *pageState) error {
	a, err := r.fetchPage(ctx, p)
	p.err = err
	if err != nil {
		st.failed(p, err)
		return err
	}
	if p.page.JSON {
		if err := p.scanner.scanJSON(a.body); err != nil {
			p.err = fmt.Errorf("%s: %w", p.path, err)
			return p.err
		}
	} else {
		p.scanner.read(a.body)
	}
	p.at, p.absent, p.rested = time.Now(), false, st.rests()
	for _, i := range p.entries {
		st.results[i] = st.compiled[i].evaluate(p.scanner.wants)
	}
	if st.table.Adapters != "" && p.page.Name == mainPage {
		st.readAdapters(&p.scanner.info, p.at)
	}
	return nil
}

// read scans a text page, by expfmt if the scanner found nothing but lines that it could not read.
func (s *scanner) read(page []byte) {
	s.scan(page)
	if bad := s.bad; bad > 0 && s.hits == 0 {
		_ = s.scanExpfmt(page) // what it read before an error counts
		s.bad = bad
	}
}

// fetchPage gets the page from the first of its paths that the engine has.
func (r *Reader) fetchPage(ctx context.Context, p *pageState) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.timeout())
	defer cancel()
	accept := "text/plain;version=0.0.4"
	if p.page.JSON {
		accept = "application/json"
	}
	paths := p.paths
	if p.path != "" {
		paths = []string{p.path}
	}
	var err error
	for _, path := range paths {
		var a answer
		a, err = r.get(ctx, path, accept, r.buf)
		if cap(a.body) > cap(r.buf) {
			r.buf = a.body
		}
		if err != nil {
			return a, err
		}
		if a.status == http.StatusOK {
			p.path = path
			return a, nil
		}
		se := &StatusError{Path: path, Status: a.status, Body: snippet(a.body)}
		if se.absent() {
			se.Hint = p.page.Hint
		}
		err = se
		if !se.absent() {
			return a, err
		}
	}
	p.path = ""
	return answer{}, err
}

// failed decides what a failure means for the values of the page.
func (st *state) failed(p *pageState, err error) {
	var status *StatusError
	refused := errors.Is(err, ErrRefused)
	gone := refused
	if errors.As(err, &status) {
		p.absent = status.absent()
		gone = p.absent || status.Status == http.StatusServiceUnavailable
	}
	if !gone {
		return // slow, cut off or in trouble: the old values stay and age
	}
	for _, q := range st.pages {
		if refused || q == p {
			q.at, q.err = time.Time{}, err
		}
	}
	if refused || p.page.Name == mainPage {
		st.adapters, st.adapter = Adapters{}, ""
	}
}

// unread is the reading of an engine whose kind is not known yet.
func (r *Reader) unread(err error) Reading {
	rd := Reading{Stale: true, TimedOut: errors.Is(err, ErrTimeout)}
	for f := range rd.sources {
		rd.sources[f] = source{why: whyPage, detail: err.Error()}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rd.Resets = r.resets
	return rd
}

// finish builds the reading and compares it with the last one.
func (r *Reader) finish(st *state, start time.Time, err error) Reading {
	rd := st.compose(time.Now())
	rd.Stale, rd.TimedOut, rd.Took = err != nil, errors.Is(err, ErrTimeout), time.Since(start)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == st && (err == nil || st.pageless()) {
		r.doubt(st, &rd)
	}
	if err == nil && r.state == st {
		if restarted(&r.counters, &rd) {
			r.resets++
		}
		keep(&r.counters, &rd)
		rd.Resets = r.resets
		r.last = rd
	}
	rd.Resets = r.resets
	return rd
}

// doubt looks around again when an engine found by itself stops making sense: another may have taken its place. It does
// so soon at first, then ever more seldom, since some engines tell nothing for good.
func (r *Reader) doubt(st *state, rd *Reading) {
	if rd.known() || len(st.pages) == 0 || r.res.kind != Auto {
		st.blind, r.doubts = 0, 0
		return
	}
	if st.blind++; st.blind >= 3 && time.Since(r.looked) > min(doubtFor<<min(r.doubts, 8), 10*absentFor) {
		r.state = nil
		r.doubts++
		r.version, r.warm = "", 0
	}
}

// doubtFor is how long an engine may tell nothing before it is looked at again.
const doubtFor = 2 * time.Second

// pageless tells whether the engine has none of the pages.
func (st *state) pageless() bool {
	for _, p := range st.pages {
		if !p.absent {
			return false
		}
	}
	return true
}
