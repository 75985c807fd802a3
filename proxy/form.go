package proxy

import (
	"bytes"
	"mime"
)

// formScan reads a multipart/form-data body that arrives in pieces and reports its small fields. Files are
// only walked over. Memory is constant: one delimiter, one part's headers, one field's value.
type formScan struct {
	delim []byte // CR LF -- boundary
	field func(name string, value []byte, file bool)

	state formState
	held  []byte // bytes that may be the start of a delimiter
	head  []byte // headers of the part, at most formHead bytes
	name  string
	file  bool
	value []byte // at most formValue bytes
	long  bool   // the value did not fit
}

type formState uint8

const (
	formBody  formState = iota // in a part's content, or in front of the first part
	formDelim                  // right behind a delimiter
	formHeads                  // in a part's headers
	formEnd                    // behind the last delimiter
	formBad
)

const (
	formHead  = 8 << 10
	formValue = 64 << 10
)

// newFormScan calls field for each part that has a name: with its value, or with nil for a file.
func newFormScan(boundary string, field func(name string, value []byte, file bool)) *formScan {
	return &formScan{
		delim: []byte("\r\n--" + boundary),
		field: field,
		held:  []byte("\r\n"), // the first delimiter has no line end in front of it
	}
}

func (f *formScan) complete() bool { return f.state == formEnd }

func (f *formScan) write(b []byte) {
	for len(b) > 0 {
		switch f.state {
		case formBody:
			b = f.body(b)
		case formDelim:
			f.head = append(f.head, b[0])
			b = b[1:]
			switch {
			case len(f.head) < 2:
			case string(f.head) == "--":
				f.state = formEnd
			case string(f.head) == "\r\n":
				f.state = formHeads
			case f.head[0] == ' ' || f.head[0] == '\t': // padding behind a boundary
				f.head = f.head[1:]
			default:
				f.state = formBad
			}
		case formHeads:
			b = f.heads(b)
		default:
			return
		}
	}
}

// body walks over content up to the next delimiter.
func (f *formScan) body(b []byte) []byte {
	if n := len(f.held); n > 0 {
		// A delimiter that began in an earlier piece ends within its own length from here.
		f.held = append(f.held, b[:min(len(b), len(f.delim))]...)
		i := bytes.Index(f.held, f.delim)
		if i >= 0 {
			f.content(f.held[:i])
			used := i + len(f.delim) - n
			f.held = f.held[:0]
			f.partEnd()
			return b[used:]
		}
		if len(b) <= len(f.delim) {
			keep := f.partial(f.held)
			f.content(f.held[:len(f.held)-keep])
			f.held = append(f.held[:0], f.held[len(f.held)-keep:]...)
			return nil
		}
		f.content(f.held[:n])
		f.held = f.held[:0]
	}
	if i := bytes.Index(b, f.delim); i >= 0 {
		f.content(b[:i])
		f.partEnd()
		return b[i+len(f.delim):]
	}
	keep := f.partial(b)
	f.content(b[:len(b)-keep])
	f.held = append(f.held[:0], b[len(b)-keep:]...)
	return nil
}

// partial is the length of the longest end of b that could start a delimiter.
func (f *formScan) partial(b []byte) int {
	for n := min(len(b), len(f.delim)-1); n > 0; n-- {
		if bytes.Equal(b[len(b)-n:], f.delim[:n]) {
			return n
		}
	}
	return 0
}

// content is a piece of the present part.
func (f *formScan) content(b []byte) {
	if f.name == "" || f.file || f.long {
		return
	}
	if f.long = len(f.value)+len(b) > formValue; f.long {
		f.value = f.value[:0]
		return
	}
	f.value = append(f.value, b...)
}

// partEnd is behind a delimiter: the part is whole.
func (f *formScan) partEnd() {
	switch {
	case f.name == "":
	case f.file:
		f.field(f.name, nil, true)
	case !f.long:
		f.field(f.name, f.value, false)
	}
	f.name, f.file, f.long, f.value, f.head = "", false, false, f.value[:0], f.head[:0]
	f.state = formDelim
}

// heads gathers the headers of a part up to its empty line.
func (f *formScan) heads(b []byte) []byte {
	for i, c := range b {
		if len(f.head) >= formHead {
			f.state = formBad
			return nil
		}
		f.head = append(f.head, c)
		if c == '\n' && bytes.HasSuffix(f.head, []byte("\r\n\r\n")) {
			f.readHead()
			f.head, f.state = f.head[:0], formBody
			return b[i+1:]
		}
	}
	return nil
}

// readHead finds the part's name. The headers begin with the line end behind the boundary.
func (f *formScan) readHead() {
	for line := range bytes.SplitSeq(f.head, []byte("\r\n")) {
		k, v, ok := bytes.Cut(line, []byte(":"))
		if !ok || !bytes.EqualFold(bytes.TrimSpace(k), []byte("content-disposition")) {
			continue
		}
		_, params, err := mime.ParseMediaType(string(bytes.TrimSpace(v)))
		if err != nil {
			continue
		}
		f.name = params["name"]
		_, f.file = params["filename"]
	}
}
