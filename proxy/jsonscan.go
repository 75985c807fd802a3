package proxy

import (
	"bytes"
	"sync"
	"unicode/utf16"
	"unicode/utf8"
)

// jsonScan reads one JSON document that arrives in pieces, in one pass, without keeping it. It reads keys in
// their exact case, decodes escapes, and asks its visitor at each value what to do with it. Only what the
// visitor enters is checked for syntax; the inside of other values is walked by quotes and brackets. Depth
// is bounded by jsonDepth for entered containers and not at all for the rest, memory is constant.
//
// The zero value with a visitor is ready to use. It never fails: after a syntax error it ignores the rest
// and complete stays false.
type jsonScan struct {
	v     jsonVisitor
	state jsonState
	act   jsonAct // of the value being read
	id    uint8   // of the value being read
	isKey bool    // the string being read is a key of an entered object
	depth int     // open brackets of the value being walked; 0 = a bare string

	stack [jsonDepth]uint8 // entered containers: node, with jsonArray set for arrays
	top   int

	hi  uint16 // first half of a surrogate pair, waiting for the second
	hex uint16 // digits of \uXXXX so far
	hxn uint8

	bom       uint8 // bytes of a byte order mark seen
	kind      byte
	keyLen    int
	keepLen   int
	cut       bool // the kept value did not fit
	*jsonRoom      // nil between documents: a stream is there most of the time
}

// jsonRoom is the memory of a document that is being read.
type jsonRoom struct {
	tmp   [4]byte
	dense [256]byte
	key   [64]byte // a longer key is cut; no known key is that long
	keep  [512]byte
}

var jsonRooms = sync.Pool{New: func() any { return new(jsonRoom) }}

const (
	jsonDepth = 32
	jsonArray = 0x80
)

// jsonAct is what a visitor wants to be done with a value.
type jsonAct uint8

const (
	// jsonSkip walks over the value.
	jsonSkip jsonAct = iota
	// jsonText gives the value to the visitor's text in pieces: a string decoded and without its quotes, any
	// other value as it stands without white space but with decoded strings. Then end is called.
	jsonText
	// jsonKeep gives a string (decoded) or scalar to the visitor's value in one piece. Other values are skipped.
	jsonKeep
	// jsonEnter makes a container's members known to the visitor. Other values are skipped.
	jsonEnter
)

// Kinds of a value, told by its first byte.
const (
	kindString byte = '"'
	kindObject byte = '{'
	kindArray  byte = '['
	kindNumber byte = '0'
	kindTrue   byte = 't'
	kindFalse  byte = 'f'
	kindNull   byte = 'n'
)

// jsonVisitor knows the documents of one purpose. Slices are only good during the call.
type jsonVisitor interface {
	// begin is told of each value within an entered container: the container's node, the key (nil in an
	// array) and the kind. The document itself has node 0 and no key. id comes back in the other calls and
	// is the node of what is entered, 1 to 127.
	begin(node uint8, key []byte, kind byte) (act jsonAct, id uint8)
	text(id uint8, piece []byte)
	// value gets what was kept; cut tells that it was longer than 512 bytes and only its start is there.
	value(id uint8, v []byte, kind byte, cut bool)
	// end closes what was entered, and each jsonText value.
	end(id uint8)
}

type jsonState uint8

const (
	jsonValue      jsonState = iota // a value must come
	jsonValueOrEnd                  // just behind [
	jsonKeyOrEnd                    // just behind {
	jsonKey
	jsonColon
	jsonAfter // a comma or the container's end must come
	jsonString
	jsonEscape
	jsonHex
	jsonScalar
	jsonWalk // within a value that is not entered, outside its strings
	jsonDone
	jsonBad
)

// reset makes s ready for another document with the same visitor.
func (s *jsonScan) reset() {
	s.rest()
	s.state, s.top, s.depth, s.hi, s.isKey, s.bom = jsonValue, 0, 0, 0, false, 0
}

// rest gives the memory of the document back; it is read no further.
func (s *jsonScan) rest() {
	if s.jsonRoom != nil {
		jsonRooms.Put(s.jsonRoom)
		s.jsonRoom = nil
	}
}

// complete reports whether exactly one whole value has been read. A number at the very end of a document
// counts as whole only after finish.
func (s *jsonScan) complete() bool { return s.state == jsonDone }

// finish tells that no more bytes will come.
func (s *jsonScan) finish() {
	if s.state == jsonScalar && s.top == 0 && s.depth == 0 {
		s.endScalar()
	}
}

// feed reads the next piece of the document.
func (s *jsonScan) feed(b []byte) {
	if s.jsonRoom == nil {
		s.jsonRoom = jsonRooms.Get().(*jsonRoom)
	}
	for i := 0; i < len(b); {
		switch s.state {
		case jsonString:
			i += s.readString(b[i:])
			continue
		case jsonWalk:
			i += s.walk(b[i:])
			continue
		case jsonScalar:
			i += s.readScalar(b[i:])
			continue
		case jsonEscape:
			s.escape(b[i])
			i++
			continue
		case jsonHex:
			s.hexDigit(b[i])
			i++
			continue
		case jsonBad:
			return
		}
		c := b[i]
		if s.top == 0 && s.state == jsonValue && s.bom < 3 && c == "\xef\xbb\xbf"[s.bom] {
			s.bom++ // Python's json, and so most engines, reads over a byte order mark
			i++
			continue
		}
		i++
		if c <= ' ' && (c == ' ' || c == '\n' || c == '\r' || c == '\t') {
			continue
		}
		switch s.state {
		case jsonValueOrEnd:
			if c == ']' {
				s.leave()
				continue
			}
			fallthrough
		case jsonValue:
			s.begin(c, s.key[:s.keyLen])
			i += s.shortValue(b[i:])
		case jsonKeyOrEnd, jsonKey:
			switch {
			case c == '"':
				i += s.beginKey(b[i:])
			case c == '}' && s.state == jsonKeyOrEnd:
				s.leave()
			default:
				s.state = jsonBad
			}
		case jsonColon:
			s.state = jsonValue
			if c != ':' {
				s.state = jsonBad
			}
		case jsonAfter:
			array := s.stack[s.top-1]&jsonArray != 0
			switch {
			case c == ',' && array:
				s.state = jsonValue
			case c == ',':
				s.state = jsonKey
			case c == ']' && array, c == '}' && !array:
				s.leave()
			default:
				s.state = jsonBad
			}
		default: // jsonDone: something behind the document
			s.state = jsonBad
		}
	}
}

// kinds are those of values that begin with a byte; 0 = none does.
var kinds = [256]byte{kindString: kindString, kindObject: kindObject, kindArray: kindArray, kindTrue: kindTrue, kindFalse: kindFalse, kindNull: kindNull,
	'0': kindNumber, '1': kindNumber, '2': kindNumber, '3': kindNumber, '4': kindNumber, '5': kindNumber, '6': kindNumber, '7': kindNumber,
	'8': kindNumber, '9': kindNumber, '-': kindNumber, 'N': kindNumber, 'I': kindNumber} // NaN and Infinity, which Python reads too

// begin starts the value whose first byte is c; key is its key, if it stands in an object.
func (s *jsonScan) begin(c byte, key []byte) {
	kind := kinds[c]
	if kind == 0 {
		s.state = jsonBad
		return
	}
	node := uint8(0)
	if s.top > 0 {
		node = s.stack[s.top-1]
	}
	if node&jsonArray != 0 || s.top == 0 {
		node, key = node&^jsonArray, nil
	}
	s.act, s.id = s.v.begin(node, key, kind)
	s.kind, s.keepLen, s.cut, s.depth = kind, 0, false, 0
	switch kind {
	case kindString:
		s.state = jsonString
		if s.act == jsonEnter {
			s.act = jsonSkip
		}
	case kindObject, kindArray:
		if s.act == jsonEnter && s.top < jsonDepth {
			s.stack[s.top], s.state = s.id, jsonKeyOrEnd
			if kind == kindArray {
				s.stack[s.top], s.state = s.id|jsonArray, jsonValueOrEnd
			}
			s.top++
			return
		}
		if s.act != jsonText {
			s.act = jsonSkip
		}
		s.depth, s.state = 1, jsonWalk
		s.emit1(c)
	default:
		s.state = jsonScalar
		if s.act == jsonEnter {
			s.act = jsonSkip
		}
		s.emit1(c)
	}
}

// shortRun is how long a string may be to be looked through byte by byte: most keys and values are shorter, and two searches
// cost more than that.
const shortRun = 24

// shortString is the length of the string that b begins in, if it is a short one without an escape that ends in b; else -1.
func shortString(b []byte) int {
	for i, c := range b[:min(len(b), shortRun)] {
		switch c {
		case '"':
			return i
		case '\\':
			return -1
		}
	}
	return -1
}

// beginKey is behind the first quote of a key. A short one is taken at once, with its colon and the beginning of its value; it returns
// how many bytes that were.
func (s *jsonScan) beginKey(b []byte) int {
	n := shortString(b)
	if n < 0 {
		s.isKey, s.keyLen, s.state = true, 0, jsonString
		return 0
	}
	i := n + 1
	if i+1 < len(b) && b[i] == ':' {
		if i++; b[i] == ' ' && i+1 < len(b) {
			i++
		}
		if c := b[i]; c > ' ' {
			s.begin(c, b[:n])
			i++
			return i + s.shortValue(b[i:])
		}
		i = n + 1
	}
	s.keyLen, s.state = copy(s.key[:], b[:n]), jsonColon
	return i
}

// shortValue takes the rest of a value that begin has begun, if that is a short string, and returns how many bytes it took.
func (s *jsonScan) shortValue(b []byte) int {
	if s.state != jsonString {
		return 0
	}
	n := shortString(b)
	if n < 0 {
		return 0
	}
	if n > 0 && s.act != jsonSkip {
		s.emit(b[:n])
	}
	s.finished()
	return n + 1
}

// leave closes the innermost entered container.
func (s *jsonScan) leave() {
	s.top--
	s.v.end(s.stack[s.top] &^ jsonArray)
	s.after()
}

// after is the state behind a whole value.
func (s *jsonScan) after() {
	s.state = jsonAfter
	if s.top == 0 {
		s.state = jsonDone
	}
}

// finished ends the value being read.
func (s *jsonScan) finished() {
	switch s.act {
	case jsonText:
		s.v.end(s.id)
	case jsonKeep:
		s.v.value(s.id, s.keep[:s.keepLen], s.kind, s.cut)
	}
	s.after()
}

// emit hands a decoded piece to where it belongs.
func (s *jsonScan) emit(p []byte) {
	switch {
	case s.isKey:
		s.keyLen += copy(s.key[s.keyLen:], p)
	case s.act == jsonText:
		s.v.text(s.id, p)
	case s.act == jsonKeep:
		n := copy(s.keep[s.keepLen:], p)
		s.keepLen += n
		s.cut = s.cut || n < len(p)
	}
}

func (s *jsonScan) emit1(c byte) {
	if s.isKey || s.act != jsonSkip {
		s.tmp[0] = c
		s.emit(s.tmp[:1])
	}
}

func (s *jsonScan) emitRune(r rune) {
	if s.isKey || s.act != jsonSkip {
		s.emit(s.tmp[:utf8.EncodeRune(s.tmp[:], r)])
	}
}

// loneHalf replaces a first surrogate that no second followed.
func (s *jsonScan) loneHalf() {
	if s.hi != 0 {
		s.hi = 0
		s.emitRune(utf8.RuneError)
	}
}

// readString reads on within a string and returns how many bytes it took. The next quote is looked for once,
// backslashes only up to it, so that a text full of line feeds is still read in one pass.
func (s *jsonScan) readString(b []byte) int {
	start, quote := 0, -1
	for {
		if quote < start {
			quote = len(b)
			if q := bytes.IndexByte(b[start:], '"'); q >= 0 {
				quote = start + q
			}
		}
		run := b[start:quote]
		e := bytes.IndexByte(run, '\\')
		if e >= 0 {
			run = run[:e]
		}
		if len(run) > 0 {
			if s.hi != 0 {
				s.loneHalf()
			}
			s.emit(run)
			start += len(run)
		}
		if e < 0 {
			if quote == len(b) {
				return quote
			}
			s.endString()
			return quote + 1
		}
		if start += s.readDense(b[start:]); start == len(b) {
			return start
		}
		if b[start] != '\\' {
			continue
		}
		if start++; start == len(b) {
			s.state = jsonEscape
			return start
		}
		s.escape(b[start])
		start++
		for s.state == jsonHex && start < len(b) {
			s.hexDigit(b[start])
			start++
		}
		if s.state != jsonString {
			return start
		}
	}
}

// readDense reads text in which escapes are frequent, such as code, gathering it for the visitor, and returns
// how many bytes it took. It stops at the end of the string, at an escape that is not a simple one and where
// escapes become rare.
func (s *jsonScan) readDense(b []byte) int {
	i, n, last := 0, 0, 0
	for i < len(b) && n < len(s.dense) && i-last < 16 {
		c := b[i]
		if c == '"' {
			break
		}
		if c == '\\' {
			if i+1 == len(b) {
				break
			}
			if c = jsonEscapes[b[i+1]]; c == 0 {
				break
			}
			i++
			last = i
		}
		s.dense[n] = c
		i++
		n++
	}
	if n > 0 {
		if s.hi != 0 {
			s.loneHalf()
		}
		s.emit(s.dense[:n])
	}
	return i
}

// endString is behind the closing quote.
func (s *jsonScan) endString() {
	if s.hi != 0 {
		s.loneHalf()
	}
	switch {
	case s.isKey:
		s.isKey, s.state = false, jsonColon
	case s.depth > 0:
		s.state = jsonWalk
		s.emit1('"')
	default:
		s.finished()
	}
}

var jsonEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape reads the byte behind a backslash.
func (s *jsonScan) escape(c byte) {
	if c == 'u' {
		s.hex, s.hxn, s.state = 0, 0, jsonHex
		return
	}
	if s.hi != 0 {
		s.loneHalf()
	}
	d := jsonEscapes[c]
	if d == 0 {
		s.state = jsonBad
		return
	}
	s.state = jsonString
	s.emit1(d)
}

// hexDigit reads one of the four digits of \uXXXX.
func (s *jsonScan) hexDigit(c byte) {
	d := hexDigit(c)
	if d < 0 {
		s.state = jsonBad
		return
	}
	s.hex = s.hex<<4 | uint16(d)
	if s.hxn++; s.hxn < 4 {
		return
	}
	s.state = jsonString
	r := rune(s.hex)
	if s.hi != 0 {
		if full := utf16.DecodeRune(rune(s.hi), r); full != utf8.RuneError {
			s.hi = 0
			s.emitRune(full)
			return
		}
		s.loneHalf()
	}
	if r >= 0xD800 && r < 0xDC00 {
		s.hi = s.hex
		return
	}
	s.emitRune(r) // a lone second half becomes U+FFFD
}

// readScalar reads on within a number or literal.
func (s *jsonScan) readScalar(b []byte) int {
	i := 0
	for i < len(b) && scalarByte[b[i]] {
		i++
	}
	if i > 0 && s.act != jsonSkip {
		s.emit(b[:i])
	}
	if i < len(b) {
		s.endScalar()
	}
	return i
}

func (s *jsonScan) endScalar() { s.finished() }

var scalarByte = func() (t [256]bool) {
	for c := range t {
		t[c] = c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '+' || c == '-' || c == '.'
	}
	return t
}()

// walk reads on within a value that is not entered, outside its strings.
func (s *jsonScan) walk(b []byte) int {
	start := 0
	flush := func(end int) {
		if s.act == jsonText && end > start {
			s.emit(b[start:end])
		}
	}
	for i, c := range b {
		switch c {
		case '"':
			flush(i + 1)
			s.state = jsonString
			return i + 1
		case '{', '[':
			s.depth++
		case '}', ']':
			if s.depth--; s.depth == 0 {
				flush(i + 1)
				s.finished()
				return i + 1
			}
		case ' ', '\n', '\r', '\t':
			flush(i)
			start = i + 1
		}
	}
	flush(len(b))
	return len(b)
}
