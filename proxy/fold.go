package proxy

// equalFold compares header names without regard to ASCII case. Almost all comparisons of a request end at the length.
func equalFold(a, b string) bool {
	return len(a) == len(b) && sameFold(a, b)
}

// sameFold compares strings of one length. Names are tokens (RFC 9110, section 5.1), so that bit 0x20 makes letters
// equal, and nothing but letters, '@' with '`' and '[' to '_' with their pairs differ by it alone.
func sameFold(a, b string) bool {
	for i := range len(a) {
		x, y := a[i], b[i]
		if x == y {
			continue
		}
		if x^y != 0x20 || x|0x20 < 'a' || x|0x20 > 'z' {
			return false
		}
	}
	return true
}

// nameSet is a fixed set of header names, in lower case, by their length: almost no name shares it with several of them.
type nameSet [][]string

func newNameSet(names ...string) (s nameSet) {
	for _, n := range names {
		for len(s) <= len(n) {
			s = append(s, nil)
		}
		s[len(n)] = append(s[len(n)], n)
	}
	return s
}

func (s nameSet) has(name string) bool {
	if len(name) >= len(s) {
		return false
	}
	for _, n := range s[len(name)] {
		if sameFold(n, name) {
			return true
		}
	}
	return false
}
