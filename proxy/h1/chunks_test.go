package h1

import (
	"bytes"
	"io"
	"net/http/httputil"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// walk feeds in to a walker in pieces of the given size.
func walk(in []byte, size int) (payload []byte, used int, done bool, err error) {
	var c Chunks
	for len(in) > 0 && !c.Done() {
		piece := in[:min(size, len(in))]
		for len(piece) > 0 && !c.Done() {
			data, n, err := c.Next(piece)
			if err != nil {
				return payload, used, false, err
			}
			payload = append(payload, data...)
			piece, in = piece[n:], in[n:]
			used += n
		}
	}
	return payload, used, c.Done(), nil
}

func TestChunks(t *testing.T) {
	const next = "GET / HTTP/1.1\r\n"
	for name, tt := range map[string]struct{ in, want string }{
		"plain":        {"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", "hello world"},
		"empty":        {"0\r\n\r\n", ""},
		"hex case":     {"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", "01234567890123456789"},
		"zeros":        {"0005\r\nhello\r\n000\r\n\r\n", "hello"},
		"extension":    {"5;a=\"b\";c\r\nhello\r\n0;x\r\n\r\n", "hello"},
		"trailers":     {"5\r\nhello\r\n0\r\nX-A: b\r\nX-C:\r\n\r\n", "hello"},
		"CRLF payload": {"4\r\n\r\n\r\n\r\n0\r\n\r\n", "\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			for size := 1; size <= len(tt.in)+len(next); size++ {
				payload, used, done, err := walk([]byte(tt.in+next), size)
				require.NoError(t, err)
				assert.True(t, done)
				assert.Equal(t, len(tt.in), used, "the next request is left alone")
				assert.Equal(t, tt.want, string(payload))
			}
		})
	}
}

func TestOneChunk(t *testing.T) {
	for n := 1; n < 300; n++ {
		p := bytes.Repeat([]byte("a"), n)
		assert.Equal(t, p, OneChunk(AppendChunk(nil, p)))
	}
	for _, in := range []string{"", "5", "5\r\nhello", "5\r\nhello\r", "5\r\nhello\n\n", "05\r\nhello\r\n", "5;a\r\nhello\r\n", "5\nhello\r\n",
		"0\r\n\r\n", "5\r\nhello\r\n0\r\n\r\n", "4\r\nhello\r\n", "\r\nhello\r\n", "fffffff\r\n", "5 \r\nhello\r\n"} {
		assert.Nil(t, OneChunk([]byte(in)), "%q", in)
	}
}

func TestChunksRefused(t *testing.T) {
	for name, in := range map[string]string{
		"no digit":              "\r\nhello",
		"sign":                  "+5\r\nhello\r\n",
		"prefix":                "0x5\r\nhello\r\n",
		"space before":          " 5\r\nhello\r\n",
		"space after":           "5 \r\nhello\r\n",
		"tab after":             "5\t\r\nhello\r\n",
		"bare LF":               "5\nhello\r\n",
		"LF in extension":       "5;a\nhello\r\n",
		"data too long":         "5\r\nhello!\r\n",
		"bare LF after data":    "5\r\nhello\n0\r\n\r\n",
		"overflow":              "fffffffffffffffff\r\n",
		"near overflow":         "8000000000000000\r\n",
		"endless zeros":         strings.Repeat("0", 40) + "5\r\n",
		"endless extension":     "5;" + strings.Repeat("a", maxChunkLine) + "\r\n",
		"underscore":            "1_0\r\n",
		"trailer without colon": "0\r\nX\r\n\r\n",
		"trailer with space":    "0\r\nX : a\r\n\r\n",
		"trailer folded":        "0\r\nX: a\r\n b\r\n\r\n",
		"trailer bare LF":       "0\r\nX: a\nY: b\r\n\r\n",
		"end with bare LF":      "0\r\n\n",
		"many trailers":         "0\r\n" + strings.Repeat("X: a\r\n", MaxFields+1) + "\r\n",
		"huge trailers":         "0\r\n" + strings.Repeat("X: "+strings.Repeat("a", 1000)+"\r\n", 20) + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			for _, size := range []int{1, 3, len(in)} {
				_, _, done, err := walk([]byte(in), size)
				assert.Error(t, err)
				assert.False(t, done)
			}
		})
	}
}

func TestChunksAtBoundary(t *testing.T) {
	var c Chunks
	assert.True(t, c.AtBoundary())
	in := []byte("5\r\nhello\r\n")
	_, n, _ := c.Next(in[:4])
	assert.False(t, c.AtBoundary())
	for n < len(in) {
		_, m, err := c.Next(in[n:])
		require.NoError(t, err)
		n += m
	}
	assert.True(t, c.AtBoundary())
}

func TestTrailer(t *testing.T) {
	var c Chunks
	in := []byte("0\r\nGrpc-Status: 0\r\nX-B:\r\n\r\n")
	_, n, err := c.Next(in)
	require.NoError(t, err)
	assert.Equal(t, len(in), n)
	require.True(t, c.Done())
	assert.Equal(t, []Field{{[]byte("Grpc-Status"), []byte("0")}, {[]byte("X-B"), []byte{}}}, c.Trailer())
	assert.Nil(t, new(Chunks).Trailer())
}

func TestAppendChunk(t *testing.T) {
	for _, size := range []int{1, 15, 16, 255, 4096, 70000} {
		p := bytes.Repeat([]byte("x"), size)
		got, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(append(AppendChunk(nil, p), LastChunk...))))
		require.NoError(t, err)
		assert.Equal(t, p, got)
	}
	assert.Empty(t, AppendChunk(nil, nil), "an empty chunk would end the body")
}

// FuzzChunks: however a body is cut, the walk gives the same payload and the
// same verdict; what we accept, net/http reads as the same payload.
func FuzzChunks(f *testing.F) {
	f.Add([]byte("5\r\nhello\r\n0\r\n\r\n"), 3)
	f.Add([]byte("5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\nGET"), 1)
	f.Fuzz(func(t *testing.T, in []byte, size int) {
		size = 1 + int(uint(size)%64)
		a, usedA, doneA, errA := walk(in, len(in)+1)
		b, usedB, doneB, errB := walk(in, size)
		if !bytes.Equal(a, b) || usedA != usedB && errA == nil || doneA != doneB || (errA == nil) != (errB == nil) {
			t.Fatalf("cut at %d: %q %d %v %v, whole: %q %d %v %v", size, b, usedB, doneB, errB, a, usedA, doneA, errA)
		}
		if !doneA {
			return
		}
		std, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(in)))
		if err == nil && !bytes.Equal(std, a) {
			t.Fatalf("payload %q, net/http %q", a, std)
		}
	})
}

func BenchmarkChunks(b *testing.B) {
	event := AppendChunk(nil, bytes.Repeat([]byte("e"), 200))
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	var c Chunks
	for b.Loop() {
		for p := event; len(p) > 0; {
			_, n, err := c.Next(p)
			if err != nil {
				b.Fatal(err)
			}
			p = p[n:]
		}
	}
}
