package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Protocol is the Upgrade token; the number is the layout's version.
const Protocol = "grapevine-link/1"

// MaxFrame bounds a frame in bytes: a whole prefix digest of the largest KV
// cache (some 100,000 blocks of 4 bytes) is well below.
const MaxFrame = 1 << 20

const (
	frameHead = 13 // length, kind, id
	answerBit = 0x80
)

// ErrFrame is a frame that breaks the layout; the connection is closed.
var ErrFrame = errors.New("malformed link frame")

// appendFrame appends one frame.
func appendFrame(b []byte, kind byte, id uint64, payload []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(frameHead-4+len(payload)))
	b = append(b, kind)
	b = binary.LittleEndian.AppendUint64(b, id)
	return append(b, payload...)
}

// readFrame reads one frame into buf, which grows when it must and is returned
// for the next call. payload is valid until then.
func readFrame(r io.Reader, buf []byte) (kind byte, id uint64, payload, next []byte, err error) {
	if cap(buf) < 512 {
		buf = make([]byte, 512)
	}
	head := buf[:frameHead]
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, 0, nil, buf, err
	}
	n := int(binary.LittleEndian.Uint32(head)) - (frameHead - 4)
	if n < 0 || n > MaxFrame-frameHead {
		return 0, 0, nil, buf, fmt.Errorf("%w: length %d", ErrFrame, n)
	}
	kind, id = head[4], binary.LittleEndian.Uint64(head[5:])
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	payload = buf[:n]
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, 0, nil, buf, err
	}
	return kind, id, payload, buf, nil
}
