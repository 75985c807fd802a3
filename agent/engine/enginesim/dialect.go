package enginesim

import (
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"
)

// dialect is how one engine speaks: the shapes below are those of real captures, fields in their order.
type dialect interface {
	name() string
	header(h http.Header, status int) // headers of every reply
	role(b []byte, a *answer) []byte  // the first chunk of a chat stream
	delta(b []byte, a *answer, text, finish string) []byte
	finish(b []byte, a *answer, reason string) []byte // the last chunk, where the last delta does not say it
	usage(b []byte, a *answer) []byte                 // the chunk with usage
	whole(b []byte, a *answer, choices []choice) []byte
	problem(p problem) (status int, body []byte)
	models() []byte
	metrics() []byte
	routes() map[string]route

	finishInDelta() bool // the last delta carries the finish reason
	lateHeader() bool    // no status line before a slot is free
	opensFinal() bool    // a trailing assistant message is continued without being asked
	repeatsPrefix() bool // a whole answer that continues repeats what the client gave
	checksModel() bool   // an unknown model is a 404
	ignoresClose() bool  // a plain close does not stop a request without stream
	defaultMax() int     // of a completion; 0 is no limit
}

// answer is what is said about a reply in all its chunks.
type answer struct {
	chat    bool
	id      string
	created int64 // unix seconds
	model   string
	index   int // choice
	prompt  int // tokens
	output  int // tokens
	cached  int // tokens
	hide    bool
	running bool // usage on each chunk (continuous_usage_stats)
	promptS float64
	outputS float64 // seconds spent
}

type choice struct{ text, finish string }

// problem is why a request is refused.
type problem struct {
	kind   problemKind
	param  string
	detail string
	tokens int // prompt tokens, or the max_tokens asked for
}

type problemKind int

const (
	badJSON problemKind = iota
	missingField
	badValue
	mediaType
	unknownModel
	promptTooLong
	outputTooLong
	queueFull
	loading
	engineDead
	shuttingDown
	internal
	notFound
	wrongMethod
	unauthorized
)

// event wraps what fill appends as one server-sent event.
func event(b []byte, fill func([]byte) []byte) []byte {
	b = append(b, "data: "...)
	b = fill(b)
	return append(b, "\n\n"...)
}

var doneEvent = []byte("data: [DONE]\n\n")

// appendString appends s as JSON, like Python and C++ do: no HTML escapes.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, '\\', 'n')
		case c == '\r':
			b = append(b, '\\', 'r')
		case c == '\t':
			b = append(b, '\\', 't')
		case c < 0x20:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		case c < utf8.RuneSelf:
			b = append(b, c)
		default:
			r, n := utf8.DecodeRuneInString(s[i:])
			b = utf8.AppendRune(b, r) // what is no UTF-8 becomes the replacement character
			i += n
			continue
		}
		i++
	}
	return append(b, '"')
}

func appendField(b []byte, name, value string) []byte {
	return appendString(append(append(append(b, '"'), name...), '"', ':'), value)
}

func appendInt(b []byte, name string, v int) []byte {
	return strconv.AppendInt(append(append(append(b, '"'), name...), '"', ':'), int64(v), 10)
}

// openAIError is the nested error object, code a number.
func openAIError(message, typ, param string, code int) []byte {
	b := appendField([]byte(`{"error":{`), "message", message)
	b = appendField(append(b, ','), "type", typ)
	if param == "" {
		b = append(b, `,"param":null,`...)
	} else {
		b = append(appendField(append(b, ','), "param", param), ',')
	}
	return append(appendInt(b, "code", code), `}}`...)
}

func detail(s string) []byte { return append(appendField([]byte{'{'}, "detail", s), '}') }

// statusDetail is what FastAPI says of paths and methods that it does not know.
func statusDetail(status int) []byte { return detail(strings.TrimSpace(http.StatusText(status))) }
