package engine

import (
	"bytes"
	"hash/maphash"
	"math"
	"strconv"
)

// The gauge scanner: one pass over a Prometheus page that looks only at the families somebody wants. It is tolerant
// where real pages are odd (repeated TYPE lines, NaN in any spelling, a byte order mark, trailing blanks and commas,
// OpenMetrics exemplars, a last line without its newline) because an engine that is read as empty is routed wrongly,
// and it allocates nothing once its buffers have grown.

// maxSeries bounds the series kept for one name; an engine with more ranks than this does not exist.
const maxSeries = 1024

// series is one sample of a wanted family.
type series struct {
	id    uint64 // of all labels, whatever their order
	group uint64 // of the labels that the term groups by
	value float64
}

// want is one name of one term.
type want struct {
	term      *Term
	series    []series
	notFinite bool // at least one series was NaN or infinite
}

// info keeps the newest series of a family whose labels are the message (vllm:lora_requests_info).
type info struct {
	labels []byte // raw text between the braces; aliases the page
	value  float64
	seen   bool
}

// scanner holds the wanted names of one page and what the last page had for them.
type scanner struct {
	seed   maphash.Seed
	byName map[string][]int // indices into wants; -1 is the info family
	wants  []want
	info   info
	hits   int // samples of wanted families
	bad    int // lines of wanted families that could not be read
}

func newScanner() *scanner {
	return &scanner{seed: maphash.MakeSeed(), byName: map[string][]int{}}
}

// add registers a name of a term and returns its index in wants.
func (s *scanner) add(name string, t *Term) int {
	s.wants = append(s.wants, want{term: t})
	s.byName[name] = append(s.byName[name], len(s.wants)-1)
	return len(s.wants) - 1
}

// addInfo registers the family whose newest series is kept with its labels.
func (s *scanner) addInfo(name string) { s.byName[name] = append(s.byName[name], -1) }

func (s *scanner) reset() {
	for i := range s.wants {
		s.wants[i].series = s.wants[i].series[:0]
		s.wants[i].notFinite = false
	}
	s.info = info{}
	s.hits, s.bad = 0, 0
}

// scan replaces what the scanner holds by what the page says.
func (s *scanner) scan(page []byte) {
	s.reset()
	page = bytes.TrimPrefix(page, []byte("\xef\xbb\xbf"))
	for len(page) > 0 {
		line := page
		if i := bytes.IndexByte(page, '\n'); i >= 0 {
			line, page = page[:i], page[i+1:]
		} else {
			page = nil
		}
		if len(line) == 0 {
			continue
		}
		if line[0] == '#' {
			if isEOF(line) {
				return // OpenMetrics: what follows is no part of the page
			}
			continue
		}
		s.line(line)
	}
}

// nameByte marks the bytes of a metric name that needs no quotes.
var nameByte = func() (t [256]bool) {
	for c := range t {
		t[c] = c == '_' || c == ':' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}
	return t
}()

func isEOF(line []byte) bool {
	return len(line) >= 5 && string(line[:5]) == "# EOF" && len(bytes.TrimRight(line[5:], " \t\r")) == 0
}

func (s *scanner) line(line []byte) {
	for len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
		line = line[1:]
	}
	end := 0
	for end < len(line) && nameByte[line[end]] {
		end++
	}
	name, rest := line[:end], line[end:]
	if end == 0 { // {"quoted name", label="value"}, the form for names outside the old alphabet
		if name = quotedName(rest); name == nil {
			return
		}
	}
	wants, ok := s.byName[string(name)]
	if !ok {
		return
	}
	rest = trimLeft(rest)
	var labels []byte
	if len(rest) > 0 && rest[0] == '{' {
		n := labelsEnd(rest)
		if n < 0 || !validLabels(rest[1:n]) {
			s.bad++
			return
		}
		labels, rest = rest[1:n], trimLeft(rest[n+1:])
	}
	value, finite, ok := parseValue(rest)
	if !ok {
		s.bad++
		return
	}
	s.deliver(wants, labels, value, finite)
}

// deliver hands a sample to those who want it.
func (s *scanner) deliver(wants []int, labels []byte, value float64, finite bool) {
	s.hits++
	for _, w := range wants {
		if w >= 0 {
			s.wants[w].addText(s, labels, value, finite)
		} else if finite && (!s.info.seen || value >= s.info.value) {
			s.info = info{labels: labels, value: value, seen: true}
		}
	}
}

// addText adds a sample whose labels are still text.
func (w *want) addText(s *scanner, labels []byte, value float64, finite bool) {
	for _, m := range w.term.Where {
		raw, has := findLabel(labels, m.Label)
		if (has && equalUnescaped(raw, m.Value)) == m.Not {
			return
		}
	}
	if w.term.Label != "" {
		raw, has := findLabel(labels, w.term.Label)
		if !has {
			return
		}
		v, err := strconv.ParseFloat(string(raw), 64)
		if err != nil {
			finite = false // "None", as vLLM writes for what it has not decided
		} else {
			value, finite = v, !math.IsNaN(v) && !math.IsInf(v, 0)
		}
	}
	var id, group uint64
	for it := (labelIter{rest: labels}); it.next(); {
		if it.name == nil {
			continue
		}
		h := mix(maphash.Bytes(s.seed, it.name), maphash.Bytes(s.seed, it.value))
		id += h
		for _, by := range w.term.By {
			if string(it.name) == by {
				group += h
			}
		}
	}
	w.put(id, group, value, finite)
}

// put adds a series, or replaces the one with the same labels: a page that holds a line twice means it once.
func (w *want) put(id, group uint64, value float64, finite bool) {
	if !finite {
		w.notFinite = true
		return
	}
	for i := range w.series {
		if w.series[i].id == id {
			w.series[i].value = value
			return
		}
	}
	if len(w.series) < maxSeries {
		w.series = append(w.series, series{id: id, group: group, value: value})
	}
}

// mix joins two hashes so that sums of the results identify a set of pairs.
func mix(a, b uint64) uint64 {
	h := a*0x9e3779b97f4a7c15 ^ b
	h ^= h >> 32
	return h * 0xd6e8feb86659fd93
}

func trimLeft(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	return b
}

// parseValue reads the sample value at the start of b; a timestamp or exemplar behind it is ignored.
func parseValue(b []byte) (value float64, finite, ok bool) {
	end := 0
	for end < len(b) && b[end] != ' ' && b[end] != '\t' && b[end] != '\r' {
		end++
	}
	b = b[:end]
	if len(b) == 0 || len(b) > 64 {
		return 0, false, false
	}
	word := b
	if word[0] == '+' || word[0] == '-' {
		word = word[1:]
	}
	if foldEqual(word, "nan") || foldEqual(word, "inf") || foldEqual(word, "infinity") {
		return 0, false, true
	}
	for _, c := range b { // ParseFloat also takes hexadecimal and underscores, which no page means
		if c != '.' && c != '-' && c != '+' && c != 'e' && c != 'E' && (c < '0' || c > '9') {
			return 0, false, false
		}
	}
	v, err := strconv.ParseFloat(string(b), 64)
	if err != nil {
		if math.IsInf(v, 0) { // 1e999
			return 0, false, true
		}
		return 0, false, false
	}
	return v, true, true
}

func foldEqual(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if c|0x20 != lower[i] {
			return false
		}
	}
	return true
}
