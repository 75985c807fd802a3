package proxy

// maxHeldEvent bounds an event that is held until it is whole; a longer one goes out in pieces, unjudged.
const maxHeldEvent = 256 << 10

// sift decides which bytes of an event stream may go to the client. Whole events go at once and unchanged; an event
// that has begun waits for its end, since no client can use half of one, and since a stream that breaks can then be
// continued or ended honestly at its boundary. An event that says that the engine gave up stays behind.
type sift struct {
	held []byte // an event that is not whole yet, from sent on
	sent int    // bytes of held that are out
	bad  []byte // the event that was held back for good

	passed int    // events with data that went out before any content, over all attempts
	skip   int    // of those, how many the present attempt has yet to repeat
	out    []byte // what is left of a piece from which events were taken out

	// What a continuation must know. Strict: it is possible, so an error behind content stays here too.
	strict bool
	first  []byte     // the first event with data, of the first attempt that had one
	said   int        // bytes of scan.plain that are in events that passed, in this attempt
	tokens int        // events with content among them
	went   replyEvent // their union

	scan replyScan
}

// start makes s ready for the next attempt's stream. Behind a head that is out, events without content that the
// client has had from an earlier attempt (a role, a message_start) are taken out of the new one.
func (s *sift) start(f replyFormat) {
	s.scan.start(f)
	s.held, s.sent, s.bad = s.held[:0], 0, nil
	s.skip = s.passed
	s.said, s.tokens, s.went = 0, 0, 0
}

// note remembers an event that passes.
func (s *sift) note(event []byte, e replyEvent) {
	s.went |= e
	s.said = s.scan.plainWhole
	if e&eventContent != 0 {
		s.tokens++
	}
	if s.strict && s.first == nil && e&eventData != 0 {
		s.first = append(s.first, event...)
	}
}

// push takes the next piece. pass may go out, and is good until the next push. ev is the union of what the events in
// it are known to hold. stop means that the event behind pass is an abort, or an error before any content: it and all
// that follows stay here.
func (s *sift) push(p []byte, content bool) (pass []byte, ev replyEvent, stop bool) {
	off := 0
	if s.sent > 0 {
		s.held = s.held[:copy(s.held, s.held[s.sent:])]
		s.sent = 0
	}
	buf := p
	if len(s.held) > 0 {
		off = len(s.held)
		s.held = append(s.held, p...)
		buf = s.held
	}
	begin, kept := 0, 0 // of the present event; of what is to go out
	taken := false
	for off < len(buf) {
		n, e := s.scan.next(buf[off:])
		off += n
		ev |= e
		if e&eventEnd == 0 {
			continue
		}
		if e&eventAbort != 0 || e&eventError != 0 && (!content || s.strict) && !s.clientError() {
			s.bad = append([]byte(nil), buf[begin:off]...)
			s.held = s.held[:0]
			return s.passing(buf[kept:begin], taken), ev, true
		}
		s.note(buf[begin:off], e)
		switch {
		case e&eventContent != 0:
			content, s.skip = true, 0
		case e&eventData == 0 || content:
		case s.skip > 0:
			s.skip--
			if !taken {
				s.out, taken = s.out[:0], true
			}
			s.out = append(s.out, buf[kept:begin]...)
			kept = off
		default:
			s.passed++
		}
		begin = off
	}
	if s.scan.atBoundary() || len(buf)-begin > maxHeldEvent {
		begin = len(buf)
	}
	pass = s.passing(buf[kept:begin], taken)
	if len(s.held) > 0 {
		s.sent = begin
	} else if begin < len(buf) {
		s.held = append(s.held, buf[begin:]...)
	}
	return pass, ev, false
}

// passing joins what is left after events were taken out.
func (s *sift) passing(rest []byte, taken bool) []byte {
	if !taken {
		return rest
	}
	s.out = append(s.out, rest...)
	return s.out
}

// clientError reports whether the error in the stream is the request's own fault, which no other replica would cure.
func (s *sift) clientError() bool {
	if s.scan.err == nil {
		return false
	}
	n := s.scan.err.status()
	return n >= 400 && n < 500 && n != 429
}

// tail is what is held at the end of the stream: an event without the empty line that would end it.
func (s *sift) tail() []byte { return s.held[s.sent:] }
