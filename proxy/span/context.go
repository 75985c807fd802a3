package span

import "encoding/hex"

// TraceID names a trace, ID a span within it. Zero is none.
type (
	TraceID [16]byte
	ID      [8]byte
)

// String is the id in hexadecimal digits.
func (t TraceID) String() string { return hex.EncodeToString(t[:]) }

// String is the id in hexadecimal digits.
func (i ID) String() string { return hex.EncodeToString(i[:]) }

// Context is what a traceparent field says (W3C Trace Context, level 1): which span the request belongs to, and whether
// whoever sent it records the trace.
type Context struct {
	Trace   TraceID
	Span    ID
	Sampled bool
}

const parentLen = len("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")

// Parse reads a traceparent. Versions above 00 are read as far as 00 goes. ok false: it says nothing that could be relied on.
func Parse(s string) (c Context, ok bool) {
	if len(s) < parentLen || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return Context{}, false
	}
	var version, flags [1]byte
	if !lowerHex(version[:], s[:2]) || !lowerHex(c.Trace[:], s[3:35]) || !lowerHex(c.Span[:], s[36:52]) || !lowerHex(flags[:], s[53:55]) {
		return Context{}, false
	}
	switch {
	case version[0] == 0xff, version[0] == 0 && len(s) != parentLen, len(s) > parentLen && s[parentLen] != '-',
		c.Trace == TraceID{}, c.Span == ID{}:
		return Context{}, false
	}
	c.Sampled = flags[0]&1 != 0
	return c, true
}

// lowerHex decodes what has lower-case digits only, as the specification demands.
func lowerHex(dst []byte, s string) bool {
	for i := range dst {
		hi, lo := nibble(s[2*i]), nibble(s[2*i+1])
		if hi > 15 || lo > 15 {
			return false
		}
		dst[i] = hi<<4 | lo
	}
	return true
}

func nibble(c byte) byte {
	switch {
	case '0' <= c && c <= '9':
		return c - '0'
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	}
	return 0xff
}

// String is the traceparent.
func (c Context) String() string {
	b := append(make([]byte, 0, parentLen), "00-"...)
	b = hex.AppendEncode(b, c.Trace[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, c.Span[:])
	if c.Sampled {
		return string(append(b, "-01"...))
	}
	return string(append(b, "-00"...))
}
