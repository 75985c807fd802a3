package proxy

import (
	"bytes"
	"mime"
	"strings"
)

// replyFormat says how a reply's body is cut into documents.
type replyFormat uint8

const (
	formatOther  replyFormat = iota // not looked into
	formatEvents                    // server-sent events
	formatJSON                      // one document
	formatLines                     // one document a line
)

// replyFormatOf tells a reply's format from its headers. A reply with a content encoding is not looked into.
func replyFormatOf(contentType, contentEncoding string) replyFormat {
	if contentEncoding != "" && !strings.EqualFold(contentEncoding, "identity") {
		return formatOther
	}
	switch contentType { // as engines write it
	case "text/event-stream", "text/event-stream; charset=utf-8":
		return formatEvents
	case "application/json":
		return formatJSON
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		media, _, _ = strings.Cut(contentType, ";")
		media = strings.ToLower(strings.TrimSpace(media))
	}
	switch media {
	case "text/event-stream":
		return formatEvents
	case "application/json", "application/problem+json":
		return formatJSON
	case "application/x-ndjson", "application/jsonl", "application/json-lines":
		return formatLines
	}
	return formatOther
}

// replyEvent is what the present event of a reply is known to hold, as bits.
type replyEvent uint16

const (
	eventEnd       replyEvent = 1 << iota // the event ends with the last byte taken
	eventData                             // a data line had bytes (a comment is no progress)
	eventContent                          // output that is not empty: text, reasoning, tool calls
	eventRich                             // output that a continuation could not carry: anything but role and plain text
	eventUsage                            // token counts
	eventFinish                           // a finish reason
	eventAbort                            // the finish reason is abort: the engine gave up, the answer is cut
	eventError                            // an error object
	eventDone                             // the end marker: [DONE], message_stop, response.completed and the like
	eventMalformed                        // its data is no JSON object
)

// replyScan follows a reply on a copy of its bytes: it changes and keeps none of them, and allocates nothing
// in the steady state. The zero value after start is ready. Not for concurrent use.
type replyScan struct {
	shape  shape
	format replyFormat
	line   lineState
	field  int8 // bytes of "data" matched
	cr     bool // the last byte was a CR: an LF belongs to it
	bom    int8 // bytes of the byte order mark seen, -1 = past it
	marker int8 // bytes of [DONE] matched, -1 = other data
	all    replyEvent
	lines  int // data lines of the present event
	events int // events with data that have ended, the end marker included
	tokens int // events with content that have ended: about one token each
	replyDoc
}

type lineState uint8

const (
	lineStart lineState = iota
	lineField
	lineColon // behind the colon of a data line, where one space is no data
	lineData
	lineSkip // a comment, or a field without meaning here
)

const doneMarker = "[DONE]"

// start makes r ready for a reply.
func (r *replyScan) start(f replyFormat) {
	r.scan.rest()
	plain, most, id, form := r.plain[:0], r.keepText, r.wantID, r.shape.form[:0]
	*r = replyScan{} // in place, where a literal would be made aside and copied
	r.format, r.plain, r.keepText, r.wantID, r.scan.v, r.shape.form = f, plain, most, id, &r.replyDoc, form
	if f == formatJSON || f == formatLines {
		r.line = lineData
	}
}

// seen is the union of all events so far, the present one included.
func (r *replyScan) seen() replyEvent { return r.all | r.event }

// atBoundary reports whether no event is open, so that one of our own may be written.
func (r *replyScan) atBoundary() bool {
	return r.format == formatEvents && r.line == lineStart && r.lines == 0
}

// scanAll takes all of p and returns the union of what its events hold.
func (r *replyScan) scanAll(p []byte) replyEvent {
	var ev replyEvent
	for len(p) > 0 {
		n, e := r.next(p)
		ev |= e
		p = p[n:]
	}
	return ev
}

// next takes p up to the end of the event that ends first, or all of it, and returns how many bytes that is
// (≥ 1 for a p that is not empty) and what is known of the event by then; eventEnd is set if it ended.
func (r *replyScan) next(p []byte) (int, replyEvent) {
	switch r.format {
	case formatJSON:
		r.payload(p)
		return len(p), r.event
	case formatLines:
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			r.payload(p)
			return len(p), r.event
		}
		r.payload(p[:i])
		return i + 1, r.dispatch()
	case formatOther:
		return len(p), 0
	}
	fresh := r.line == lineStart && r.lines == 0 && !r.cr && r.bom < 0
	if fresh {
		if n, text := r.shape.fits(p); n > 0 {
			return n, r.alike(text)
		}
		r.runs = 0
	}
	for i := 0; i < len(p); {
		c := p[i]
		if r.cr {
			r.cr = false
			if c == '\n' {
				i++
				continue
			}
		}
		if r.bom >= 0 {
			if r.bom < 3 && c == "\xef\xbb\xbf"[r.bom] {
				r.bom++
				i++
				continue
			}
			r.bom = -1
		}
		switch r.line {
		case lineStart:
			switch c {
			case '\n', '\r':
				r.cr = c == '\r'
				i++
				if r.lines > 0 {
					if r.cr && i < len(p) && p[i] == '\n' {
						r.cr = false
						i++
					}
					ev := r.dispatch()
					if fresh && ev == plainEvent && r.runs == 1 && !r.cr {
						r.shape.learn(p[:i], r.run)
					}
					r.run = nil
					return i, ev
				}
				continue
			case ':':
				r.line = lineSkip
			default:
				r.line, r.field = lineField, 0
			}
		case lineField:
			const name = "data"
			switch {
			case r.field < int8(len(name)) && c == name[r.field]:
				r.field++
				i++
			case r.field == int8(len(name)) && c == ':':
				r.line = lineColon
				r.startData()
				i++
			case r.field == int8(len(name)) && (c == '\n' || c == '\r'):
				r.line = lineSkip
				r.startData()
			default:
				r.line = lineSkip
			}
		case lineColon:
			r.line = lineData
			if c == ' ' {
				i++
			}
		default:
			n, end := lineLength(p[i:])
			if r.line == lineData && n > 0 {
				r.payload(p[i : i+n])
			}
			i += n
			if end {
				r.cr = p[i] == '\r'
				r.line = lineStart
				i++
			}
		}
	}
	return len(p), r.event
}

// lineLength is the number of bytes in front of the first line end, and whether there is one.
func lineLength(p []byte) (int, bool) {
	n := bytes.IndexByte(p, '\n')
	end := n >= 0
	if !end {
		n = len(p)
	}
	if cr := bytes.IndexByte(p[:n], '\r'); cr >= 0 {
		return cr, true
	}
	return n, end
}

// startData begins a data line. Several lines of one event are joined by a line feed.
func (r *replyScan) startData() {
	if r.lines++; r.lines > 1 {
		r.payload([]byte{'\n'})
	}
}

// payload is a piece of an event's data.
func (r *replyScan) payload(b []byte) {
	if len(b) == 0 {
		return
	}
	r.event |= eventData
	if r.marker >= 0 && r.format == formatEvents {
		for r.marker < int8(len(doneMarker)) && len(b) > 0 && b[0] == doneMarker[r.marker] {
			r.marker++
			b = b[1:]
		}
		if len(b) == 0 || r.marker == int8(len(doneMarker)) {
			return // blanks behind the marker are forgiven
		}
		if r.marker > 0 { // starts like the marker and is no object
			r.event |= eventMalformed
		}
		r.marker = -1
	}
	r.scan.feed(b)
}

// dispatch ends the present event and makes ready for the next.
func (r *replyScan) dispatch() replyEvent {
	if r.event&eventData != 0 {
		r.events++
		if r.marker == int8(len(doneMarker)) {
			r.event |= eventDone
		} else {
			r.endDoc()
		}
		if r.event&eventContent != 0 {
			r.tokens++
		}
	}
	ev := r.event | eventEnd
	r.all |= ev
	r.lines, r.marker = 0, 0
	r.startDoc()
	return ev
}

// alike counts an event of the known shape.
func (r *replyScan) alike(text []byte) replyEvent {
	r.events++
	r.tokens++
	r.keep(text)
	r.plainWhole = len(r.plain)
	return plainEvent
}

// finish tells that the body has ended, and returns what its last event held. For server-sent events an open
// event stays open: it is not whole and was not dispatched.
func (r *replyScan) finish() replyEvent {
	if r.format == formatJSON || r.format == formatLines && r.event&eventData != 0 {
		return r.dispatch()
	}
	return 0
}
