package engine

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Mapping is a parsed GRAPEVINE_ENGINE_METRICS.
type Mapping struct {
	Entries []Entry
	Pages   []Page
}

// ParseMapping parses a custom mapping: entries separated by semicolons or line ends, each "field = expression",
// optionally "@ page". Several entries of one field are alternatives, best first; they go before what the engine's
// own table says.
//
//	running = my_running
//	waiting = my_queue_size | my_queue_len                     the first name that exists
//	waiting = sum(queue{state!="done",pool="gpu"})             label filter
//	kv_usage = cache_used / cache_total                        operators + - * / stand between blanks,
//	kv_usage = cache_percent * 0.01                            left to right; numbers scale
//	running = sum(max by (dp_rank) (num_running))              the largest row of each rank, summed over ranks
//	kv_capacity_tokens = max(cache_info[num_blocks]) * 16      the number is the text of a label
//	running = sum(/loads/*/running) @ json:/v1/loads           a JSON page, read by pointers, * for every element
//	waiting = queue_len @ /internal/metrics                    another Prometheus page of the engine
//
// Folds are sum, max, mean and count; without one, shares and flags are averaged or maximised and all else summed.
// Pages are paths on the engine's URL or whole URLs. The error is one line that names the entry.
func ParseMapping(s string) (Mapping, error) {
	var m Mapping
	n := 0
	for _, text := range splitEntries(s) {
		if strings.TrimSpace(text) == "" {
			continue
		}
		n++
		e, page, err := parseEntry(text)
		if err != nil {
			return Mapping{}, fmt.Errorf("engine metrics: entry %d, %q: %w", n, strings.Join(strings.Fields(text), " "), err)
		}
		m.Entries = append(m.Entries, e)
		if !slices.ContainsFunc(m.Pages, func(p Page) bool { return p.Name == page.Name }) {
			m.Pages = append(m.Pages, page)
		}
	}
	return m, nil
}

// splitEntries splits at semicolons and line ends outside quotes.
func splitEntries(s string) []string {
	var out []string
	start, quoted := 0, false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && (c == ';' || c == '\n'):
			out = append(out, s[start:i])
			start = i + 1
		}
	}
	return append(out, s[start:])
}

// mappingParser walks one entry.
type mappingParser struct {
	rest string
	fold Fold // default of the field
}

func parseEntry(text string) (Entry, Page, error) {
	name, expr, ok := strings.Cut(text, "=")
	if !ok {
		return Entry{}, Page{}, errors.New(`want "field = expression"`)
	}
	field, err := parseField(strings.TrimSpace(name))
	if err != nil {
		return Entry{}, Page{}, err
	}
	p := &mappingParser{rest: expr, fold: fields[field].fold}
	e := Entry{Field: field}
	for op, more := Take, true; more; {
		t, err := p.term()
		if err != nil {
			return e, Page{}, err
		}
		t.Op = op
		e.Terms = append(e.Terms, t)
		op, more = p.operator()
	}
	page, err := p.page()
	if err != nil {
		return e, page, err
	}
	e.Page = page.Name
	return e, page, checkNames(e, page)
}

func parseField(name string) (Field, error) {
	var all []string
	for f := range numFields {
		if fields[f].name == name {
			return f, nil
		}
		all = append(all, fields[f].name)
	}
	return 0, fmt.Errorf("unknown field %q, want one of %s", name, strings.Join(all, ", "))
}

// checkNames refuses an entry that could never be read.
func checkNames(e Entry, page Page) error {
	found := false
	for _, t := range e.Terms {
		for _, n := range t.Names {
			found = true
			if pointer := strings.HasPrefix(n, "/"); pointer != page.JSON {
				if pointer {
					return fmt.Errorf("%s is a JSON pointer, but the page is Prometheus text: add @ json:/path", n)
				}
				return fmt.Errorf("%s is no JSON pointer: on %s names start with /", n, page.Name)
			}
		}
	}
	if !found {
		return errors.New("no metric in the expression")
	}
	return nil
}

const mappingSpecial = " \t\r\n;=|{}[]()@,\""

func (p *mappingParser) skip() { p.rest = strings.TrimLeft(p.rest, " \t\r\n") }

// accept takes a character if it is next.
func (p *mappingParser) accept(c byte) bool {
	p.skip()
	if p.rest == "" || p.rest[0] != c {
		return false
	}
	p.rest = p.rest[1:]
	return true
}

func (p *mappingParser) expect(c byte) error {
	if !p.accept(c) {
		return fmt.Errorf("want %q %s", c, p.where())
	}
	return nil
}

func (p *mappingParser) where() string {
	p.skip()
	if p.rest == "" {
		return "at the end"
	}
	return fmt.Sprintf("before %q", p.rest)
}

// word takes the longest run of ordinary characters.
func (p *mappingParser) word() string {
	p.skip()
	n := strings.IndexAny(p.rest, mappingSpecial)
	if n < 0 {
		n = len(p.rest)
	}
	w := p.rest[:n]
	p.rest = p.rest[n:]
	return w
}

var mappingOps = map[string]Op{"+": Plus, "-": Minus, "*": Times, "/": Over}

// operator takes + - * or / standing alone; false at the end of the expression.
func (p *mappingParser) operator() (Op, bool) {
	before := p.rest
	if op, ok := mappingOps[p.word()]; ok {
		return op, true
	}
	p.rest = before
	return Take, false
}

var mappingFolds = map[string]Fold{"sum": Sum, "max": Max, "mean": Mean, "count": Count}

// term takes a number, a name with its trimmings, or a fold around one.
func (p *mappingParser) term() (Term, error) {
	w := p.word()
	if _, op := mappingOps[w]; w == "" || op {
		p.rest = w + p.rest
		return Term{}, fmt.Errorf("want a metric or a number %s", p.where())
	}
	if v, err := strconv.ParseFloat(w, 64); err == nil {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return Term{}, fmt.Errorf("%s is no number to calculate with", w)
		}
		return Term{Const: v}, nil
	}
	t := Term{Fold: p.fold}
	fold, isFold := mappingFolds[w]
	if !isFold || !p.accept('(') {
		err := p.names(w, &t)
		return t, err
	}
	t.Fold = fold
	w = p.word()
	if inner, ok := mappingFolds[w]; ok {
		before := p.rest
		if p.word() == "by" {
			t.Inner = inner
			if err := p.groups(&t); err != nil {
				return t, err
			}
			if err := p.expect('('); err != nil {
				return t, err
			}
			if err := p.names(p.word(), &t); err != nil {
				return t, err
			}
			if err := p.expect(')'); err != nil {
				return t, err
			}
			return t, p.expect(')')
		}
		p.rest = before
	}
	if err := p.names(w, &t); err != nil {
		return t, err
	}
	return t, p.expect(')')
}

// groups takes (label, label).
func (p *mappingParser) groups(t *Term) error {
	if err := p.expect('('); err != nil {
		return err
	}
	for {
		l := p.word()
		if l == "" {
			return fmt.Errorf("want a label %s", p.where())
		}
		t.By = append(t.By, l)
		if !p.accept(',') {
			return p.expect(')')
		}
	}
}

// names takes first | second [label] {filter}; the first word is already read.
func (p *mappingParser) names(first string, t *Term) error {
	for w := first; ; w = p.word() {
		if _, op := mappingOps[w]; w == "" || op {
			return fmt.Errorf("want a metric %s", p.where())
		}
		t.Names = append(t.Names, w)
		if !p.accept('|') {
			break
		}
	}
	if p.accept('[') {
		if t.Label = p.word(); t.Label == "" {
			return fmt.Errorf("want a label %s", p.where())
		}
		if err := p.expect(']'); err != nil {
			return err
		}
	}
	if !p.accept('{') {
		return nil
	}
	for !p.accept('}') {
		m, err := p.match()
		if err != nil {
			return err
		}
		t.Where = append(t.Where, m)
		if !p.accept(',') {
			return p.expect('}')
		}
	}
	return nil
}

// match takes label="value" or label!="value".
func (p *mappingParser) match() (Match, error) {
	w := p.word()
	m := Match{Label: strings.TrimSuffix(w, "!"), Not: strings.HasSuffix(w, "!")}
	if m.Label == "" {
		return m, fmt.Errorf("want a label %s", p.where())
	}
	if err := p.expect('='); err != nil {
		return m, err
	}
	p.skip()
	quoted, err := strconv.QuotedPrefix(p.rest)
	if err != nil || quoted[0] != '"' {
		return m, fmt.Errorf("want a value in double quotes %s", p.where())
	}
	p.rest = p.rest[len(quoted):]
	m.Value, err = strconv.Unquote(quoted)
	return m, err
}

// page takes @ path, @ json:path, or nothing for the metrics page.
func (p *mappingParser) page() (Page, error) {
	if !p.accept('@') {
		if p.skip(); p.rest != "" {
			return Page{}, fmt.Errorf("unexpected %q", p.rest)
		}
		return Page{Name: mainPage, Paths: []string{"/metrics"}}, nil
	}
	name := strings.TrimSpace(p.rest)
	path, isJSON := strings.CutPrefix(name, "json:")
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "http://") && !strings.HasPrefix(path, "https://") ||
		strings.ContainsAny(path, " \t") {
		return Page{}, fmt.Errorf("page %q: want /path, json:/path or a whole URL", name)
	}
	return Page{Name: name, Paths: []string{path}, JSON: isJSON}, nil
}
