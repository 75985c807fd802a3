package link

import (
	"bufio"
	"io"
	"time"
)

// Handler answers one question by appending to reply. ok false sends nothing:
// the asker's deadline passes, as it would for a version that does not know
// the kind. It must not block, and must not keep payload.
type Handler func(kind byte, payload, reply []byte) (answer []byte, ok bool)

// writeTimeout ends a connection whose asker does not read its answers.
const writeTimeout = 2 * time.Second

// Stream is what Serve needs of a connection.
type Stream interface {
	io.ReadWriter
	SetWriteDeadline(time.Time) error
}

// Serve answers questions until the connection ends; the error is nil when the
// asker closed it between two frames. r holds what was read ahead of the
// upgrade's end; it may be nil.
func Serve(nc Stream, r *bufio.Reader, handle Handler) error {
	if r == nil {
		r = bufio.NewReaderSize(nc, 4096)
	}
	var buf, reply, out []byte
	for {
		kind, id, payload, next, err := readFrame(r, buf)
		buf = next
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if kind&answerBit != 0 {
			return ErrFrame
		}
		answer, ok := handle(kind, payload, reply[:0])
		reply = answer
		if ok {
			out = appendFrame(out, kind|answerBit, id, answer)
		}
		// Answers to questions that came together go out together.
		if len(out) > 0 && (r.Buffered() < frameHead || len(out) > 32<<10) {
			nc.SetWriteDeadline(time.Now().Add(writeTimeout))
			if _, err := nc.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		if cap(buf) > 64<<10 {
			buf = nil // a whole digest passed; do not keep its size
		}
		if cap(reply) > 64<<10 {
			reply, out = nil, nil
		}
	}
}
