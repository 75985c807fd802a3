package engine

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/routing"
)

// staleAfter is the age at which a value stops being known. LMDeploy itself refreshes its gauges every 10 s.
const staleAfter = 10 * time.Second

// absentFor is how long a page that the engine does not have is not asked for again.
const absentFor = 30 * time.Second

// Reader reads one engine. Make it with [New].
type Reader struct {
	cfg    Config
	res    resolved
	err    error // of the configuration; every call returns it
	base   string
	client *http.Client

	reading sync.Mutex // held by Read
	buf     []byte

	mu       sync.Mutex // guards what follows; never held over a request
	state    *state     // nil until detected
	evidence string
	version  string
	looked   time.Time // last Detect
	last     Reading
	resets   int
	health   healthMemory
	warm     routing.Service // what answered the last warm-up
}

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
}

// New makes a Reader; it calls nothing. An invalid cfg gives a Reader whose every call returns the error of
// [Config.Validate].
func New(cfg Config) *Reader {
	r := &Reader{cfg: cfg, client: cfg.Client}
	r.res, r.err = cfg.resolve()
	if r.err != nil {
		return r
	}
	r.base = baseURL(cfg.URL)
	if r.client == nil {
		r.client = newClient(cfg.URL)
	}
	if k := r.res.kind; k != Auto {
		r.use(tableOf(k), "configured")
	}
	return r
}

// Close drops idle connections; the Reader may be used again.
func (r *Reader) Close() {
	if r.client != nil {
		r.client.CloseIdleConnections()
	}
}

// Kind is the engine's kind, Auto until it is known.
func (r *Reader) Kind() Kind {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == nil {
		return Auto
	}
	return r.state.table.Kind
}

// Evidence says how the kind was told, "" until it is known.
func (r *Reader) Evidence() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.evidence
}

// Version is the engine's own version, "" if it does not say. It is asked for by Detect and Models.
func (r *Reader) Version() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.version
}

// Abilities is what the engine can do; of an unknown engine the least.
func (r *Reader) Abilities() Abilities {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == nil {
		return openaiTable.Abilities
	}
	return r.state.table.Abilities
}

// Serves are the kinds of path that the engine answers, as far as its table and the last warm-up tell; 0 unknown.
func (r *Reader) Serves() routing.Service {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.warm == routing.ServeEmbeddings: // chat and completions were tried first and refused
		return routing.ServeEmbeddings | routing.ServeRerank | routing.ServeTokenize | routing.ServeOther
	case r.state != nil:
		return r.state.table.Abilities.Serves
	}
	return 0
}

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

// use installs a table.
func (r *Reader) use(t *Table, evidence string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.evidence = evidence
	if r.state != nil && r.state.table == t {
		return
	}
	r.state = r.newState(t)
	r.last, r.health, r.warm = Reading{}, healthMemory{}, 0
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
	p.at, p.absent = time.Now(), false
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
	if err == nil && r.state == st {
		if restarted(&r.last, &rd) {
			r.resets++
		}
		keep(&r.last, &rd)
		r.last.Resets = r.resets
		r.doubt(st, &rd)
	}
	rd.Resets = r.resets
	return rd
}

// doubt looks around again when an engine found by itself stops making sense: another may have taken its place.
func (r *Reader) doubt(st *state, rd *Reading) {
	if rd.known() || len(st.pages) == 0 || r.res.kind != Auto {
		st.blind = 0
		return
	}
	if st.blind++; st.blind >= 3 && time.Since(r.looked) > absentFor {
		r.state = nil
	}
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

// keep remembers the reading for the next comparison; a counter that is unknown for a while keeps its old value.
func keep(last, rd *Reading) {
	old := *last
	*last = *rd
	for _, c := range []struct{ old, cur *routing.Opt[float64] }{
		{&old.GenerationTokens, &last.GenerationTokens}, {&old.PromptTokens, &last.PromptTokens},
		{&old.FirstTokens, &last.FirstTokens}, {&old.PrefixQueries, &last.PrefixQueries},
		{&old.ProcessStart, &last.ProcessStart},
	} {
		if !c.cur.OK {
			*c.cur = *c.old
		}
	}
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

// Last is the newest reading that came without an error, for those who must not wait for one.
func (r *Reader) Last() Reading {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// Problems counts lines of wanted metrics on the newest pages that could not be read.
func (r *Reader) Problems() int {
	r.reading.Lock()
	defer r.reading.Unlock()
	r.mu.Lock()
	st := r.state
	r.mu.Unlock()
	n := 0
	if st != nil {
		for _, p := range st.pages {
			n += p.scanner.bad
		}
	}
	return n
}

// ensure returns the engine's table in use, looking around if it is not known yet.
func (r *Reader) ensure(ctx context.Context) (*state, error) {
	if r.err != nil {
		return nil, r.err
	}
	if st := r.current(); st != nil {
		return st, nil
	}
	if _, err := r.Detect(ctx); err != nil {
		return nil, err
	}
	return r.current(), nil
}

func (r *Reader) current() *state {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}
