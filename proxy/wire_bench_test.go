package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// script is a connection without a kernel behind it: each read gives the next piece, writes are counted.
type script struct {
	net.Conn
	next   func() ([]byte, error)
	rest   []byte
	writes int
	bytes  int
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		b, err := s.next()
		if err != nil {
			return 0, err
		}
		s.rest = b
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *script) Write(p []byte) (int, error) {
	s.writes++
	s.bytes += len(p)
	return len(p), nil
}

func (s *script) Close() error                     { return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }
func (s *script) RemoteAddr() net.Addr             { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 40000} }

// onScript is a proxy whose engine answers every request with the pieces that reply gives.
func onScript(tb testing.TB, reply func() ([]byte, error)) (*Server, *script) {
	u, _ := url.Parse("http://engine:1")
	t := routing.NewTable(routing.Member{Boot: 1, Node: "a", Addr: "a:1"})
	pol, err := routing.NewPolicy("local")
	require.NoError(tb, err)
	eng := &script{next: reply}
	p, err := New(Config{Table: t, Policy: pol, EngineURL: u, Salt: NewPrefixSalt([]byte("k")),
		Dial: func(context.Context, string, string) (net.Conn, error) { return eng, nil }})
	require.NoError(tb, err)
	t.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, time.Now())
	t.SetModels(1, []routing.Model{{ID: "fake"}}, 0, time.Now())
	s := p.ClientServer(NewServer(p.ClientHandler(), nil, nil))
	return s, eng
}

func chatRequest(size int, stream bool) []byte {
	body := fmt.Sprintf(`{"model":"fake","stream":%v,"max_tokens":75,"seed":1,"messages":[{"role":"user","content":"%s"}]}`,
		stream, strings.Repeat("word ", size/5))
	return fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: bench\r\nAccept: */*\r\n"+
		"Authorization: Bearer sk-123\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

// serveScript runs n requests over one connection.
func serveScript(s *Server, req []byte, n int) *script {
	c := &script{}
	c.next = func() ([]byte, error) {
		if n == 0 {
			return nil, io.EOF
		}
		n--
		return req, nil
	}
	w := &wireServerConn{s: s, nc: c, watched: true, remote: "127.0.0.1:40000"}
	for w.one() == fateNext {
	}
	return c
}

// BenchmarkRequest is all of a small request but the kernel's part.
func BenchmarkRequest(b *testing.B) {
	body := `{"id":"chatcmpl-1","object":"chat.completion","model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":"` +
		strings.Repeat("tok ", 100) + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":512,"completion_tokens":100,"total_tokens":612}}`
	reply := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	s, _ := onScript(b, func() ([]byte, error) { return reply, nil })
	serveScript(s, chatRequest(2048, false), 100)
	b.ReportAllocs()
	b.ResetTimer()
	c := serveScript(s, chatRequest(2048, false), b.N)
	require.Equal(b, b.N, c.writes)
}

// BenchmarkChunk is all of a streamed event but the kernel's part.
func BenchmarkChunk(b *testing.B) {
	n := 0
	head := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	event := `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","model":"fake","choices":[{"index":0,"delta":{"content":"tok 123"},"finish_reason":null}]}` + "\n\n"
	chunk := fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event)
	end := `data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
	last := fmt.Appendf(nil, "%x\r\n%s\r\n0\r\n\r\n", len(end), end)
	s, _ := onScript(b, func() ([]byte, error) {
		n++
		switch {
		case n == 1:
			return head, nil
		case n <= b.N+1:
			return chunk, nil
		}
		return last, nil
	})
	b.ReportAllocs()
	b.ResetTimer()
	c := serveScript(s, chatRequest(2048, true), 1)
	require.GreaterOrEqual(b, c.writes, b.N)
}
