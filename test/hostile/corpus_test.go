package hostile

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// oddRequest is one case of testdata/http: what a client sends on one connection; or of testdata/answers: what an engine
// answers with.
//
// A case begins with "== name". Lines with # say why it is there. All other lines are sent one after the other without their
// line end, with the escapes \r \n \t \v \\ \" and \xHH, but for those with %:
//
//	% repeat N text    text N times
//	% half             the client ends its side
//	% bytewise         what follows is written byte by byte
//	% requests N       the client means N requests; 1 if not given
//	% method M         the method of the request that gets this answer; POST if not given
type oddRequest struct {
	class, name, why string
	method           string
	bytes            []byte
	half, bytewise   bool
	requests         int
}

// readCorpus reads all cases of a folder below testdata, in the order of the files.
func readCorpus(t *testing.T, folder string) []oddRequest {
	t.Helper()
	files, err := filepath.Glob("testdata/" + folder + "/*.txt")
	require.NoError(t, err)
	var out []oddRequest
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		class := strings.TrimSuffix(filepath.Base(f), ".txt")
		var c *oddRequest
		for n, line := range strings.Split(string(text), "\n") {
			word, arg, _ := strings.Cut(strings.TrimPrefix(line, "% "), " ")
			switch {
			case strings.HasPrefix(line, "== "):
				out = append(out, oddRequest{class: class, name: line[3:], requests: 1, method: "POST"})
				c = &out[len(out)-1]
			case line == "":
			case strings.HasPrefix(line, "# "):
				c.why = line[2:]
			case !strings.HasPrefix(line, "% "):
				c.bytes = append(c.bytes, unescaped(line)...)
			case word == "half":
				c.half = true
			case word == "bytewise":
				c.bytewise = true
			case word == "method":
				c.method = arg
			case word == "requests":
				c.requests = number(t, arg)
			case word == "repeat":
				times, what, _ := strings.Cut(arg, " ")
				c.bytes = append(c.bytes, bytes.Repeat(unescaped(what), number(t, times))...)
			default:
				require.FailNow(t, "no such directive", "%s:%d: %s", f, n+1, line)
			}
		}
	}
	require.Greater(t, len(out), 100, "the corpus is there")
	return out
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	require.NoError(t, err)
	return n
}

func unescaped(s string) []byte {
	var b []byte
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 == len(s) {
			b = append(b, s[i])
			continue
		}
		i++
		switch s[i] {
		case 'r':
			b = append(b, '\r')
		case 'n':
			b = append(b, '\n')
		case 't':
			b = append(b, '\t')
		case 'v':
			b = append(b, '\v')
		case 'x':
			n, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
			if err != nil {
				panic(err)
			}
			b = append(b, byte(n))
			i += 2
		default:
			b = append(b, s[i])
		}
	}
	return b
}
