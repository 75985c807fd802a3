package h1

// Limits inside chunked framing. Extensions and trailers carry nothing an
// engine or client of this API uses; nginx and Node bound them alike.
const (
	maxChunkLine = 4 << 10  // bytes of one chunk-size line with its extensions
	maxTrailers  = 16 << 10 // bytes of all trailer lines
)

var (
	errChunkSize  = &Error{400, "malformed chunk size"}
	errChunkEnd   = &Error{400, "chunk data longer than its size"}
	errChunkLine  = &Error{400, "chunk extension too long or malformed"}
	errTrailer    = &Error{400, "malformed trailer"}
	errTrailerMax = &Error{431, "trailers too large"}
)

type chunkState uint8

const (
	chunkSize     chunkState = iota // at a digit of the size
	chunkSizeMore                   // after at least one digit
	chunkExt                        // in an extension
	chunkSizeLF                     // CR seen, LF must follow
	chunkData                       // left bytes of payload
	chunkDataCR                     // CR after the payload
	chunkDataLF                     // LF after it
	trailerStart                    // at the start of a trailer line
	trailerLine                     // inside one
	trailerLF                       // CR of a trailer line seen
	chunksEndLF                     // CR of the final empty line seen
	chunksDone
)

// Chunks walks a chunked body as it comes, in pieces cut anywhere. The zero
// value is at the start of a body. It keeps no bytes but those of trailers.
type Chunks struct {
	state  chunkState
	left   int64 // payload bytes left of this chunk
	line   int   // bytes of this line
	extras int   // bytes of trailers
	fields int   // trailer fields
	name   bool  // the trailer line's colon has come
	lines  []byte
}

// Trailer returns the trailer fields of a body that is Done, if it had any.
func (c *Chunks) Trailer() []Field {
	if len(c.lines) == 0 {
		return nil
	}
	h := head{length: -1}
	if _, err := h.parse(append(c.lines, '\r', '\n')); err != nil {
		return nil // a length that is none: it frames nothing here
	}
	return h.fields
}

// Done reports whether the final empty line has been passed.
func (c *Chunks) Done() bool { return c.state == chunksDone }

// AtBoundary reports whether the next byte would begin a chunk: what went out
// so far is whole chunks, so a chunk of our own may follow.
func (c *Chunks) AtBoundary() bool { return c.state == chunkSize }

// Next consumes bytes of p up to the end of the next run of payload. data is
// that run (nil if p holds none), n the bytes consumed in all. Call it again
// with p[n:] until n is len(p) or Done; bytes after the end are not consumed.
func (c *Chunks) Next(p []byte) (data []byte, n int, err error) {
	i := 0
	for i < len(p) {
		b := p[i]
		switch c.state {
		case chunkSize, chunkSizeMore:
			d := hexDigit[b]
			switch {
			case d != 0xff:
				if c.left > 1<<56 {
					return nil, i, errChunkSize
				}
				c.left = c.left<<4 | int64(d)
				c.state = chunkSizeMore
				if c.line++; c.line > 16 {
					return nil, i, errChunkSize
				}
			case c.state == chunkSize:
				return nil, i, errChunkSize
			case b == '\r':
				c.state = chunkSizeLF
			case b == ';':
				c.state = chunkExt
			default:
				// White space after the size is a MAY of RFC 9112 7.1.1 that
				// others read differently.
				return nil, i, errChunkSize
			}
			i++
		case chunkExt:
			switch {
			case b == '\r':
				c.state = chunkSizeLF
			case b < ' ' && b != '\t' || b == 0x7f:
				return nil, i, errChunkLine
			}
			if c.line++; c.line > maxChunkLine {
				return nil, i, errChunkLine
			}
			i++
		case chunkSizeLF:
			if b != '\n' {
				return nil, i, errBareCR
			}
			c.line = 0
			c.state = chunkData
			if c.left == 0 {
				c.state = trailerStart
			}
			i++
		case chunkData:
			run := int64(len(p) - i)
			if run > c.left {
				run = c.left
			}
			data = p[i : i+int(run)]
			i += int(run)
			c.left -= run
			if c.left == 0 {
				c.state = chunkDataCR
			}
			return data, i, nil
		case chunkDataCR:
			if b != '\r' {
				return nil, i, errChunkEnd
			}
			c.state = chunkDataLF
			i++
		case chunkDataLF:
			if b != '\n' {
				return nil, i, errBareCR
			}
			c.state = chunkSize
			i++
		case trailerStart:
			if b == '\r' {
				c.state = chunksEndLF
				i++
				continue
			}
			if !token[b] {
				return nil, i, errTrailer
			}
			if c.fields++; c.fields > MaxFields {
				return nil, i, errTrailerMax
			}
			c.name = false
			c.state = trailerLine
			fallthrough
		case trailerLine:
			switch {
			case b == '\r':
				if !c.name {
					return nil, i, errTrailer
				}
				c.state = trailerLF
			case !c.name && b == ':':
				c.name = true
			case !c.name && !token[b], b < ' ' && b != '\t', b == 0x7f:
				return nil, i, errTrailer
			}
			if c.extras++; c.extras > maxTrailers {
				return nil, i, errTrailerMax
			}
			c.lines = append(c.lines, b)
			i++
		case trailerLF:
			if b != '\n' {
				return nil, i, errBareCR
			}
			c.lines = append(c.lines, b)
			c.state = trailerStart
			i++
		case chunksEndLF:
			if b != '\n' {
				return nil, i, errBareCR
			}
			c.state = chunksDone
			return nil, i + 1, nil
		case chunksDone:
			return nil, i, nil
		}
	}
	return nil, i, nil
}

// OneChunk returns the payload of p if that is exactly one chunk as AppendChunk writes it, else nil. Where a chunk may begin
// (AtBoundary) it need not be walked.
func OneChunk(p []byte) []byte {
	i, n := 0, 0
	for i < min(len(p), 7) && hexDigit[p[i]] != 0xff {
		n = n<<4 | int(hexDigit[p[i]])
		i++
	}
	end := i + len("\r\n") + n
	if n == 0 || p[0] == '0' || len(p) != end+2 || p[i] != '\r' || p[i+1] != '\n' || p[end] != '\r' || p[end+1] != '\n' {
		return nil
	}
	return p[i+2 : end]
}

var hexDigit = func() (t [256]byte) {
	for i := range t {
		t[i] = 0xff
	}
	for i := byte(0); i < 10; i++ {
		t['0'+i] = i
	}
	for i := byte(0); i < 6; i++ {
		t['a'+i], t['A'+i] = 10+i, 10+i
	}
	return t
}()

// AppendChunk appends p as one chunk.
func AppendChunk(b, p []byte) []byte {
	if len(p) == 0 {
		return b // an empty chunk would end the body
	}
	b = append(AppendChunkHead(b, len(p)), p...)
	return append(b, '\r', '\n')
}

// AppendChunkHead appends the size line of a chunk of n > 0 bytes.
func AppendChunkHead(b []byte, n int) []byte {
	const hex = "0123456789abcdef"
	var size [16]byte
	i := len(size)
	for ; n > 0; n >>= 4 {
		i--
		size[i] = hex[n&15]
	}
	b = append(b, size[i:]...)
	return append(b, '\r', '\n')
}

// LastChunk ends a chunked body without trailers.
var LastChunk = []byte("0\r\n\r\n")
