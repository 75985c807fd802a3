package h1

import (
	"bytes"
	"encoding/binary"
)

// Limits of a message head. nginx allows 4 buffers of 8 KB, Node 16 KB in all,
// net/http 1 MB; 64 KB holds the longest trace and cookie headers seen.
const (
	MaxHead   = 64 << 10 // bytes, start line and fields
	MaxFields = 128      // fields of one head
)

// Error says why a message cannot be accepted and which status answers it.
type Error struct {
	Status int    // 400, 405, 431, 501 or 505; 502 when an engine's answer is malformed
	Reason string // for logs and the error body; never quotes the peer's bytes
}

func (e *Error) Error() string { return "http/1.1: " + e.Reason }

// The errors are values, so that refusing a flood allocates nothing.
var (
	errBareLF        = &Error{400, "line ended by a bare LF"}
	errBareCR        = &Error{400, "CR without LF"}
	errStartLine     = &Error{400, "malformed start line"}
	errMethod        = &Error{400, "malformed method"}
	errTarget        = &Error{400, "malformed request target"}
	errAbsolute      = &Error{400, "request target is not in origin form"}
	errConnect       = &Error{400, "CONNECT is not served here"}
	errTrace         = &Error{405, "TRACE is not served here"} // it would show what proxies add
	errVersion       = &Error{505, "HTTP version not supported"}
	errFold          = &Error{400, "folded header line"}
	errFieldName     = &Error{400, "malformed header name"}
	errFieldValue    = &Error{400, "control character in a header value"}
	errHeadSize      = &Error{431, "request head too large"}
	errFieldCount    = &Error{431, "too many header fields"}
	errHost          = &Error{400, "missing, repeated or malformed Host"}
	errLength        = &Error{400, "malformed or repeated Content-Length"}
	errBothLengths   = &Error{400, "both Content-Length and Transfer-Encoding"}
	errCoding        = &Error{501, "transfer coding not supported"}
	errCodingList    = &Error{400, "malformed Transfer-Encoding"}
	errCodingVersion = &Error{400, "Transfer-Encoding in HTTP/1.0"}
	errStatusLine    = &Error{502, "malformed status line"}
)

// Field is one header field; both parts are slices of the head's buffer, the
// value without surrounding white space.
type Field struct{ Name, Value []byte }

// Known is a header field that the path itself acts on, found by one switch
// while the head is parsed.
type Known uint8

// Known fields. Everything else is Other and only passed on.
const (
	Other Known = iota
	Host
	ContentLength
	TransferEncoding
	Connection
	KeepAlive
	Upgrade
	TE
	Trailer
	Expect
	ProxyConnection
	ContentType
)

// Framing says how a message's body ends.
type Framing struct {
	Length  int64 // bytes; 0 no body, -1 not told by a length
	Chunked bool  // chunked coding, Length is -1
	// ToEnd: the body lasts until the connection closes (answers only).
	ToEnd bool
}

// Request is a request head, parsed in place.
type Request struct {
	Method, Target []byte
	Minor          int // HTTP/1.Minor: 0 or 1
	Fields         []Field
	Framing
	HostValue []byte
	// Close: the connection ends after this exchange (Connection: close, or
	// HTTP/1.0 without keep-alive).
	Close bool
	// Upgrade is the value of the Upgrade field if Connection lists it.
	Upgrade []byte
	// Continue: the client waits for 100 (Continue) before the body.
	Continue bool
	// Hop holds the indexes in Fields of hop-by-hop fields (RFC 9110 7.6.1):
	// bit i for Fields[i].
	Hop fieldSet
	// Framed holds those that frame or address the message: Host, Content-Length, Transfer-Encoding and Trailer.
	Framed fieldSet
}

// fieldSet is a set of fields by their index.
type fieldSet [MaxFields / 64]uint64

func (s *fieldSet) add(i int) { s[i>>6] |= 1 << (i & 63) }

// Has reports whether Fields[i] is in the set.
func (s *fieldSet) Has(i int) bool { return s[i>>6]&(1<<(i&63)) != 0 }

// IsHop reports whether Fields[i] is for this connection only.
func (r *Request) IsHop(i int) bool { return r.Hop.Has(i) }

// Response is an answer's head, parsed in place.
type Response struct {
	Status int
	Minor  int
	Reason []byte
	Fields []Field
	Framing
	Close       bool
	Upgrade     []byte
	ContentType []byte
	Hop         fieldSet
	Framed      fieldSet // as a request's
}

// IsHop reports whether Fields[i] is for this connection only.
func (r *Response) IsHop(i int) bool { return r.Hop.Has(i) }

// head is what requests and answers have in common while they are parsed.
type head struct {
	fields     []Field
	hop        fieldSet
	framed     fieldSet
	length     int64 // -1 none
	chunked    bool
	coding     bool // any Transfer-Encoding seen
	host       []byte
	hosts      int
	close      bool
	keepAlive  bool
	upgrade    []byte
	connUpg    bool
	expect     bool
	ctype      []byte
	connection bool
}

// ParseRequest reads the request head at the start of buf. It returns the
// number of bytes the head takes (leading empty lines and the final one
// included), or 0 and no error when more bytes are needed. req is overwritten;
// its slices point into buf.
func ParseRequest(buf []byte, req *Request) (int, error) {
	start := 0
	// RFC 9112 2.2: ignore empty lines before the request line.
	for start+1 < len(buf) && buf[start] == '\r' && buf[start+1] == '\n' && start < 8 {
		start += 2
	}
	if start < len(buf) && buf[start] == '\n' {
		return 0, errBareLF
	}
	n, err := req.parse(buf[start:min(len(buf), start+usualHead)])
	if err != nil { // not whole, or not valid: its end tells
		var end int
		if end, err = headEnd(buf[start:]); end == 0 || err != nil {
			return 0, err
		}
		if n, err = req.parse(buf[start : start+end]); err != nil {
			return 0, err
		}
	}
	return start + n, nil
}

// usualHead is up to how many bytes are parsed without looking for the head's end before: mostly it is there, and a sender of
// single bytes must not have it all parsed again and again.
const usualHead = 4 << 10

func (r *Request) parse(b []byte) (int, error) {
	line, rest := cutLine(b)
	if err := r.parseLine(line); err != nil {
		return 0, err
	}
	h := head{fields: r.Fields[:0], length: -1}
	rest, err := h.parse(rest)
	r.Fields, r.Hop, r.Framed = h.fields, h.hop, h.framed
	if err != nil {
		return 0, err
	}
	if h.hosts > 1 || r.Minor == 1 && h.hosts == 0 || h.hosts == 1 && !validHost(h.host) {
		return 0, errHost
	}
	if h.coding {
		switch {
		case r.Minor == 0:
			return 0, errCodingVersion
		case h.length >= 0:
			return 0, errBothLengths
		case !h.chunked:
			return 0, errCoding
		}
	}
	r.Framing = Framing{Length: max(h.length, 0)}
	if h.chunked {
		r.Framing = Framing{Length: -1, Chunked: true}
	}
	r.HostValue = h.host
	r.Close = h.close || r.Minor == 0 && !h.keepAlive
	r.Upgrade = nil
	if h.connUpg {
		r.Upgrade = h.upgrade
	}
	r.Continue = h.expect && r.Minor == 1
	return len(b) - len(rest), nil
}

// ParseResponse reads the head of an answer to a request with the given
// method. It returns the bytes the head takes, or 0 when more are needed.
// Malformed answers give an *Error with status 502.
func ParseResponse(buf []byte, resp *Response, method []byte) (int, error) {
	n, err := resp.parse(buf[:min(len(buf), usualHead)], method)
	if err != nil { // as of a request
		var end int
		if end, err = headEnd(buf); end == 0 || err != nil {
			return 0, answerError(err)
		}
		if n, err = resp.parse(buf[:end], method); err != nil {
			return 0, err
		}
	}
	return n, nil
}

func (r *Response) parse(b, method []byte) (int, error) {
	line, rest := cutLine(b)
	if err := r.parseLine(line); err != nil {
		return 0, err
	}
	h := head{fields: r.Fields[:0], length: -1}
	rest, err := h.parse(rest)
	r.Fields, r.Hop, r.Framed = h.fields, h.hop, h.framed
	if err != nil {
		return 0, answerError(err)
	}
	if h.coding && (h.length >= 0 || !h.chunked) {
		return 0, answerError(errBothLengths)
	}
	r.Close = h.close || r.Minor == 0 && !h.keepAlive
	r.ContentType = h.ctype
	r.Upgrade = nil
	if h.connUpg {
		r.Upgrade = h.upgrade
	}
	// RFC 9112 6.3, in its order.
	switch {
	case r.Status < 200, r.Status == 204, r.Status == 304, string(method) == "HEAD":
		r.Framing = Framing{}
	case h.chunked:
		r.Framing = Framing{Length: -1, Chunked: true}
	case h.length >= 0:
		r.Framing = Framing{Length: h.length}
	default:
		r.Framing = Framing{Length: -1, ToEnd: true}
		r.Close = true
	}
	return len(b) - len(rest), nil
}

func answerError(err error) error {
	if e, ok := err.(*Error); ok && e.Status != 502 {
		return &Error{Status: 502, Reason: e.Reason}
	}
	return err
}

// headEnd finds the empty line that ends a head: the bytes up to and with it,
// 0 if it has not come yet.
func headEnd(b []byte) (int, error) {
	i := bytes.Index(b, crlf2)
	if i < 0 {
		if len(b) >= MaxHead {
			return 0, errHeadSize
		}
		// A sender that uses bare LF would never give us the end: say so now.
		for at := 0; ; {
			j := bytes.IndexByte(b[at:], '\n')
			if j < 0 {
				return 0, nil
			}
			if at += j; at == 0 || b[at-1] != '\r' {
				return 0, errBareLF
			}
			at++
		}
	}
	if i+4 > MaxHead {
		return 0, errHeadSize
	}
	return i + 4, nil
}

var crlf2 = []byte("\r\n\r\n")

// cutLine splits b after its first CRLF; if b holds none, the line is empty.
func cutLine(b []byte) (line, rest []byte) {
	i := bytes.IndexByte(b, '\n')
	if i < 1 || b[i-1] != '\r' {
		return b[:i+1], b[i+1:] // the caller's grammar refuses the LF
	}
	return b[:i-1], b[i+1:]
}

func (r *Request) parseLine(line []byte) error {
	sp := bytes.IndexByte(line, ' ')
	if sp <= 0 {
		return errStartLine
	}
	r.Method = line[:sp]
	if !validMethod(r.Method) {
		return errMethod
	}
	rest := line[sp+1:]
	sp = bytes.LastIndexByte(rest, ' ')
	if sp <= 0 {
		return errStartLine
	}
	r.Target = rest[:sp]
	minor, err := version(rest[sp+1:])
	if err != nil {
		return err
	}
	r.Minor = minor
	if !validTarget(r.Target) {
		return errTarget
	}
	switch {
	case string(r.Method) == "CONNECT":
		return errConnect
	case string(r.Method) == "TRACE":
		return errTrace
	case r.Target[0] == '/':
	case len(r.Target) == 1 && r.Target[0] == '*' && string(r.Method) == "OPTIONS":
	default:
		return errAbsolute
	}
	return nil
}

func (r *Response) parseLine(line []byte) error {
	// HTTP/1.1 SP 3DIGIT [ SP reason ]; some engines leave the last SP out.
	if len(line) < 12 || line[8] != ' ' {
		return errStatusLine
	}
	minor, err := version(line[:8])
	if err != nil {
		return errStatusLine
	}
	status := 0
	for _, c := range line[9:12] {
		if c < '0' || c > '9' {
			return errStatusLine
		}
		status = status*10 + int(c-'0')
	}
	if status < 100 || len(line) > 12 && line[12] != ' ' {
		return errStatusLine
	}
	r.Status, r.Minor, r.Reason = status, minor, nil
	if len(line) > 13 {
		r.Reason = line[13:]
		if !validValue(r.Reason) {
			return errStatusLine
		}
	}
	return nil
}

// version reads HTTP/1.0 or HTTP/1.1; the name is case-sensitive.
func version(b []byte) (minor int, err error) {
	if len(b) != 8 || string(b[:5]) != "HTTP/" || b[6] != '.' ||
		b[5] < '0' || b[5] > '9' || b[7] < '0' || b[7] > '9' {
		return 0, errStartLine
	}
	if b[5] != '1' || b[7] > '1' {
		return 0, errVersion
	}
	return int(b[7] - '0'), nil
}

// parse reads the field lines and returns what stands behind the empty one; where that is missing, b is malformed.
func (h *head) parse(b []byte) (rest []byte, err error) {
	for {
		i := bytes.IndexByte(b, '\n')
		if i < 1 || b[i-1] != '\r' {
			return nil, errBareLF
		}
		line := b[:i-1]
		b = b[i+1:]
		if len(line) == 0 {
			break
		}
		if len(h.fields) == MaxFields {
			return nil, errFieldCount
		}
		if line[0] == ' ' || line[0] == '\t' {
			return nil, errFold
		}
		colon := bytes.IndexByte(line, ':')
		if colon <= 0 {
			return nil, errFieldName
		}
		name := line[:colon]
		for _, c := range name {
			if !token[c] {
				return nil, errFieldName // space before the colon included
			}
		}
		value := trim(line[colon+1:])
		if !validValue(value) {
			return nil, errFieldValue
		}
		h.fields = append(h.fields, Field{name, value})
		if k := Lookup(name); k != Other {
			if err := h.known(k, value); err != nil {
				return nil, err
			}
		}
	}
	if h.connection {
		h.markListed()
	}
	return b, nil
}

func (h *head) known(k Known, value []byte) error {
	i := len(h.fields) - 1
	hop := false
	switch k {
	case Host:
		h.framed.add(i)
		h.host = value
		h.hosts++
	case Trailer:
		h.framed.add(i)
	case ContentLength:
		h.framed.add(i)
		n, ok := parseLength(value)
		if !ok || h.length >= 0 {
			return errLength
		}
		h.length = n
	case TransferEncoding:
		h.framed.add(i)
		hop = true
		if h.coding {
			return errCodingList
		}
		h.coding = true
		h.chunked = equalFold(value, "chunked")
		if !h.chunked && bytes.IndexByte(value, ',') < 0 && len(value) == 0 {
			return errCodingList
		}
	case Connection, ProxyConnection:
		hop, h.connection = true, true
		if k == ProxyConnection {
			break
		}
		for v := range bytes.SplitSeq(value, comma) {
			v = trim(v)
			switch {
			case equalFold(v, "close"):
				h.close = true
			case equalFold(v, "keep-alive"):
				h.keepAlive = true
			case equalFold(v, "upgrade"):
				h.connUpg = true
			}
		}
	case Upgrade:
		hop = true
		h.upgrade = value
	case KeepAlive, TE:
		hop = true
	case Expect:
		h.expect = equalFold(value, "100-continue")
		hop = h.expect
	case ContentType:
		h.ctype = value
	}
	if hop {
		h.hop.add(i)
	}
	return nil
}

// markListed marks the fields that a Connection field names. End-to-end fields
// that no sender may list (they frame or address the message) stay.
func (h *head) markListed() {
	for _, f := range h.fields {
		if k := Lookup(f.Name); k != Connection {
			continue
		}
		for v := range bytes.SplitSeq(f.Value, comma) {
			v = trim(v)
			switch Lookup(v) {
			case Host, ContentLength, ContentType, Connection:
				continue
			}
			for j := range h.fields {
				if bytes.EqualFold(h.fields[j].Name, v) {
					h.hop.add(j)
				}
			}
		}
	}
}

var comma = []byte(",")

// Lookup tells a known field by its name in any case.
func Lookup(name []byte) Known {
	switch len(name) {
	case 2:
		if equalFold(name, "te") {
			return TE
		}
	case 4:
		if equalFold(name, "host") {
			return Host
		}
	case 6:
		if equalFold(name, "expect") {
			return Expect
		}
	case 7:
		if equalFold(name, "upgrade") {
			return Upgrade
		}
		if equalFold(name, "trailer") {
			return Trailer
		}
	case 10:
		if equalFold(name, "connection") {
			return Connection
		}
		if equalFold(name, "keep-alive") {
			return KeepAlive
		}
	case 12:
		if equalFold(name, "content-type") {
			return ContentType
		}
	case 14:
		if equalFold(name, "content-length") {
			return ContentLength
		}
	case 16:
		if equalFold(name, "proxy-connection") {
			return ProxyConnection
		}
	case 17:
		if equalFold(name, "transfer-encoding") {
			return TransferEncoding
		}
	}
	return Other
}

// parseLength reads 1*DIGIT; no sign, no list, no overflow.
func parseLength(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// Fits reports whether a request that came in another form, HTTP/2, can be written as HTTP/1.1: net/http lets spaces pass in its
// method and target, so that an engine would read another line than was meant.
func Fits(method, target, host string) bool {
	return validMethod(method) && validTarget(target) && validHost(host)
}

func validMethod[T string | []byte](b T) bool {
	for i := range len(b) {
		if !token[b[i]] {
			return false
		}
	}
	return len(b) > 0
}

// validTarget refuses a fragment too: it never travels (RFC 9110 7.1).
func validTarget[T string | []byte](b T) bool {
	for i := range len(b) {
		if c := b[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return false
		}
	}
	return len(b) > 0
}

// validHost allows what may stand in a Host field: reg-name, IPv4, an IPv6
// literal in brackets, and a port; empty is allowed by the RFC.
func validHost[T string | []byte](b T) bool {
	for i := range len(b) {
		if !hostByte[b[i]] {
			return false
		}
	}
	return true
}

func validValue(b []byte) bool {
	const ones, high = 0x0101010101010101, 0x8080808080808080
	for len(b) >= 8 { // eight at once: the high bit of a byte that is below a space or, less surely, 0x7f or above
		w := binary.LittleEndian.Uint64(b)
		if ((w-ones*' ')|(w+ones))&high != 0 {
			break
		}
		b = b[8:]
	}
	for _, c := range b {
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// trim removes optional white space (SP and HTAB) on both sides.
func trim(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// equalFold compares b with a lower-case ASCII word.
func equalFold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i := range b {
		c := b[i]
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// token and hostByte are the grammar's character classes.
var token, hostByte = func() (t, h [256]bool) {
	for c := byte('0'); c <= '9'; c++ {
		t[c], h[c] = true, true
	}
	for c := byte('a'); c <= 'z'; c++ {
		t[c], h[c] = true, true
		t[c-32], h[c-32] = true, true
	}
	for _, c := range []byte("!#$%&'*+-.^_`|~") {
		t[c] = true
	}
	for _, c := range []byte("-._~%!$&'()*+,;=:[]") {
		h[c] = true
	}
	return t, h
}()
