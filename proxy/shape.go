package proxy

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// shape is how the newest plain event of a stream looked around its text. Engines write one event after another of which only the
// text differs, and numbers: counters, the time. No word that the scan knows has a digit in it, so what it found in one event holds
// for each with the same bytes around a text that needs no decoding, digits aside, and that one need not be read as JSON. What
// differs elsewhere is scanned.
type shape struct {
	form []byte // the event without its text
	at   int    // where the text stands; 0 = no shape is known
}

const (
	longestForm = 640 // bytes
	longestText = 256 // bytes that are looked at one by one
)

// plainEvent is what an event that becomes a shape holds, and nothing else that outlives it.
const plainEvent = eventEnd | eventData | eventContent

// learn takes the shape of a whole event whose only text is that part of it. A text that had to be decoded lies elsewhere.
func (s *shape) learn(event, text []byte) {
	at := int(uintptr(unsafe.Pointer(unsafe.SliceData(text))) - uintptr(unsafe.Pointer(unsafe.SliceData(event))))
	end := at + len(text)
	if at <= 0 || end >= len(event) || event[at-1] != '"' || event[end] != '"' || len(event)-len(text) > longestForm {
		return
	}
	if bytes.IndexByte(event, '\\') >= 0 { // a digit of an escape is part of a word
		return
	}
	s.form, s.at = append(append(s.form[:0], event[:at]...), event[end:]...), at
}

// fits returns the length of the event that p begins with, and its text, if it is a whole one of the shape; else 0.
func (s *shape) fits(p []byte) (n int, text []byte) {
	if s.at == 0 {
		return 0, nil
	}
	at := like(s.form[:s.at], p)
	if at < 0 {
		return 0, nil
	}
	end := at
	for most := min(len(p), at+longestText); ; end++ {
		if end == most || p[end] == '\\' || p[end] < ' ' {
			return 0, nil
		}
		if p[end] == '"' {
			break
		}
	}
	rest := like(s.form[s.at:], p[end:])
	if end == at || rest < 0 {
		return 0, nil
	}
	return end + rest, p[at:end]
}

// like returns how many bytes of p are like form, one number being as good as another, or -1. form neither begins nor ends in one.
func like(form, p []byte) int {
	i, j := 0, 0
	for {
		n := equal(form[i:], p[j:])
		i, j = i+n, j+n
		if i == len(form) {
			return j
		}
		for ; n > 0 && digits(form[i-1:i]) > 0; n-- { // back to the number's beginning
			i, j = i-1, j-1
		}
		a, b := digits(form[i:]), digits(p[j:])
		if a == 0 || b == 0 {
			return -1
		}
		i, j = i+a, j+b
	}
}

// equal is how many bytes are the same at the beginning of a and b.
func equal(a, b []byte) (n int) {
	most := min(len(a), len(b))
	for ; n+8 <= most; n += 8 {
		if x := binary.LittleEndian.Uint64(a[n:]) ^ binary.LittleEndian.Uint64(b[n:]); x != 0 {
			return n + bits.TrailingZeros64(x)/8
		}
	}
	for n < most && a[n] == b[n] {
		n++
	}
	return n
}

// digits is how many there are at the beginning of b.
func digits(b []byte) (n int) {
	for n < len(b) && b[n]-'0' <= 9 {
		n++
	}
	return n
}
