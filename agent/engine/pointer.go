package engine

import (
	"encoding/json"
	"hash/maphash"
	"math"
	"strconv"
	"strings"
)

// JSON pages. A name is an RFC 6901 pointer in which * stands for every element of an array or object:
// /loads/*/num_running_reqs. The scalar members of the innermost element matched by * (or of the page's own object)
// are its labels, so that filters and groups work as they do on Prometheus pages.

// scanJSON fills the scanner from a JSON page.
func (s *scanner) scanJSON(page []byte) error {
	s.reset()
	var root any
	if err := json.Unmarshal(page, &root); err != nil {
		return err
	}
	for name, wants := range s.byName {
		tokens := pointerTokens(name)
		var n uint64
		walk(root, root, tokens, func(v, element any) {
			n++
			s.hits++
			for _, w := range wants {
				s.wants[w].addJSON(s, n, v, element)
			}
		})
	}
	return nil
}

func pointerTokens(p string) []string {
	tokens := strings.Split(strings.TrimPrefix(p, "/"), "/")
	if p == "" || p == "/" {
		return nil
	}
	for i, t := range tokens {
		tokens[i] = strings.ReplaceAll(strings.ReplaceAll(t, "~1", "/"), "~0", "~")
	}
	return tokens
}

// walk calls emit for every value that the pointer reaches.
func walk(v, element any, tokens []string, emit func(v, element any)) {
	if len(tokens) == 0 {
		emit(v, element)
		return
	}
	t, rest := tokens[0], tokens[1:]
	switch x := v.(type) {
	case []any:
		if t == "*" {
			for _, e := range x {
				walk(e, e, rest, emit)
			}
		} else if i, err := strconv.Atoi(t); err == nil && i >= 0 && i < len(x) {
			walk(x[i], element, rest, emit)
		}
	case map[string]any:
		if t == "*" {
			for _, e := range x {
				walk(e, e, rest, emit)
			}
		} else if e, ok := x[t]; ok {
			walk(e, element, rest, emit)
		}
	}
}

// addJSON adds the n-th value that a pointer reached.
func (w *want) addJSON(s *scanner, n uint64, v, element any) {
	members, _ := element.(map[string]any)
	for _, m := range w.term.Where {
		text, has := scalarText(members[m.Label])
		if (has && text == m.Value) == m.Not {
			return
		}
	}
	value, ok := 1.0, true // Count needs no number
	if w.term.Fold != Count {
		value, ok = scalarNumber(v)
	}
	if !ok {
		return
	}
	var group uint64
	for _, by := range w.term.By {
		if text, has := scalarText(members[by]); has {
			group += mix(maphash.String(s.seed, by), maphash.String(s.seed, text))
		}
	}
	w.put(n, group, value, !math.IsNaN(value) && !math.IsInf(value, 0))
}

func scalarText(v any) (string, bool) {
	switch x := v.(type) {
	case string:
		return x, true
	case bool:
		return strconv.FormatBool(x), true
	case float64:
		return strconv.FormatFloat(x, 'f', -1, 64), true
	}
	return "", false
}

// scalarNumber takes numbers, truth values and numbers in quotes; null and text are no numbers.
func scalarNumber(v any) (float64, bool) {
	switch x := v.(type) {
	case float64:
		return x, true
	case bool:
		if x {
			return 1, true
		}
		return 0, true
	case string:
		f, err := strconv.ParseFloat(x, 64)
		return f, err == nil
	}
	return 0, false
}
