package engine

// Labels of a sample, read where they stand. A value is kept in its escaped form and unescaped only to compare it.

// labelIter walks the text between the braces of a sample.
type labelIter struct {
	rest        []byte
	name, value []byte // value is still escaped; name is nil for a quoted metric name without a value
	bad         bool
}

// next moves to the next label; false at the end or where the text stops making sense (bad).
func (it *labelIter) next() bool {
	b := it.rest
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == ',') {
		b = b[1:]
	}
	if len(b) == 0 {
		it.rest = nil
		return false
	}
	if b[0] == '"' { // quoted name, of a label or of the metric
		n := quoteEnd(b)
		if n < 0 {
			return it.stop()
		}
		it.name, b = b[1:n], trimLeft(b[n+1:])
		if len(b) == 0 || b[0] != '=' {
			it.name, it.value, it.rest = nil, nil, b
			return true
		}
	} else {
		n := 0
		for n < len(b) && b[n] != '=' && b[n] != ' ' && b[n] != '\t' && b[n] != ',' {
			n++
		}
		it.name, b = b[:n], trimLeft(b[n:])
		if n == 0 {
			return it.stop()
		}
	}
	if len(b) == 0 || b[0] != '=' {
		return it.stop()
	}
	b = trimLeft(b[1:])
	n := quoteEnd(b)
	if n < 0 {
		return it.stop()
	}
	it.value, it.rest = b[1:n], b[n+1:]
	return true
}

func (it *labelIter) stop() bool {
	it.rest, it.bad = nil, true
	return false
}

// quoteEnd returns the index of the quote that closes the one at b[0], or -1.
func quoteEnd(b []byte) int {
	if len(b) == 0 || b[0] != '"' {
		return -1
	}
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}

// labelsEnd returns the index of the brace that closes the one at b[0], outside quotes, or -1.
func labelsEnd(b []byte) int {
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '"':
			n := quoteEnd(b[i:])
			if n < 0 {
				return -1
			}
			i += n
		case '}':
			return i
		}
	}
	return -1
}

// quotedName returns the metric name of {"name", ...}, or nil.
func quotedName(b []byte) []byte {
	b = trimLeft(b)
	if len(b) == 0 || b[0] != '{' {
		return nil
	}
	b = trimLeft(b[1:])
	n := quoteEnd(b)
	if n < 0 {
		return nil
	}
	if after := trimLeft(b[n+1:]); len(after) > 0 && after[0] == '=' {
		return nil
	}
	return b[1:n]
}

// validLabels tells whether the text between the braces makes sense to its end.
func validLabels(labels []byte) bool {
	it := labelIter{rest: labels}
	for it.next() {
	}
	return !it.bad
}

// findLabel returns the escaped value of a label.
func findLabel(labels []byte, name string) ([]byte, bool) {
	for it := (labelIter{rest: labels}); it.next(); {
		if string(it.name) == name {
			return it.value, true
		}
	}
	return nil, false
}

// plain returns the byte that an escaped label value starts with and how long its escaped form is.
func plain(raw []byte) (c byte, used int) {
	if raw[0] == '\\' && len(raw) > 1 {
		switch raw[1] {
		case 'n':
			return '\n', 2
		case '\\', '"':
			return raw[1], 2
		}
	}
	return raw[0], 1
}

// equalUnescaped compares an escaped label value with a plain one.
func equalUnescaped(raw []byte, want string) bool {
	j := 0
	for len(raw) > 0 {
		c, used := plain(raw)
		if j >= len(want) || want[j] != c {
			return false
		}
		raw = raw[used:]
		j++
	}
	return j == len(want)
}

// unescape returns the plain form of a label value.
func unescape(raw []byte) string {
	out := make([]byte, 0, len(raw))
	for len(raw) > 0 {
		c, used := plain(raw)
		out, raw = append(out, c), raw[used:]
	}
	return string(out)
}
