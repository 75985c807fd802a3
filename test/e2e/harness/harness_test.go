package harness

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// serve answers like an engine; the prompt says how.
func serve(s *Stage, n int) (addr string) {
	addr = s.Addr(n, EnginePort)
	ln, err := net.Listen("tcp", addr)
	require.NoError(s.t, err)
	chunk := func(w io.Writer, text string) {
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", text)
		w.(http.Flusher).Flush()
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !strings.Contains(string(body), `"stream":true`) {
			fmt.Fprint(w, `{"choices":[{"message":{"content":"whole"},"finish_reason":"stop"}]}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		chunk(w, "one ")
		switch {
		case strings.Contains(string(body), "cut"):
			panic(http.ErrAbortHandler)
		case strings.Contains(string(body), "undone"):
			return
		case strings.Contains(string(body), "failed"):
			fmt.Fprint(w, "data: {\"error\":{\"message\":\"broken\"}}\n\ndata: [DONE]\n\n")
			return
		}
		chunk(w, "two")
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
	})}
	go srv.Serve(ln)
	s.t.Cleanup(func() { srv.Close() })
	return addr
}

func TestClientJudgesAnswers(t *testing.T) {
	s := New(t)
	base := "http://" + serve(s, 1)
	for _, tt := range []struct {
		prompt  string
		stream  bool
		content string
		err     string
	}{
		{"hello", false, "whole", ""},
		{"hello", true, "one two", ""},
		{"cut", true, "one ", "unexpected EOF"},
		{"undone", true, "one ", "without [DONE]"},
		{"failed", true, "one ", "broken"},
	} {
		var c Client
		a := c.Do(context.Background(), base, Chat{Model: "m", Prompt: tt.prompt, Stream: tt.stream, MaxTokens: 2})
		assert.Equal(t, tt.content, a.Content, tt.prompt)
		if tt.err == "" {
			assert.NoError(t, a.Err, tt.prompt)
		} else {
			assert.ErrorContains(t, a.Err, tt.err, tt.prompt)
		}
		c.Close()
	}
}

func TestClientTriesAllAddresses(t *testing.T) {
	s := New(t)
	serve(s, 3) // nobody listens at 1 and 2
	for range 10 {
		c := Client{Hosts: map[string][]string{"agents.test": {s.IP(1), s.IP(2), s.IP(3)}}}
		a := c.Do(context.Background(), fmt.Sprintf("http://agents.test:%d", EnginePort), Chat{Model: "m"})
		require.NoError(t, a.Err)
		c.Close()
	}
}

func TestTapRecordsWhatPassed(t *testing.T) {
	s := New(t)
	tap := s.Tap(1, serve(s, 1))
	var c Client
	defer c.Close()
	var want []Answer
	for i, prompt := range []string{"hello", "stream", "cut", "hello again"} {
		want = append(want, c.Do(context.Background(), tap.URL, Chat{Model: "m", Prompt: prompt, Stream: i%2 == 1 || prompt == "cut", ID: fmt.Sprint(i)}))
	}
	got := tap.Exchanges()
	require.Len(t, got, len(want))
	for i, x := range got {
		assert.Equal(t, "/v1/chat/completions", x.Path)
		assert.Equal(t, fmt.Sprint(i), x.Header.Get("X-Request-Id"))
		assert.Equal(t, want[i].Chat.Body(), x.Sent)
		assert.Equal(t, want[i].Body, x.Body)
		assert.Equal(t, want[i].Header, x.Answer)
		assert.Equal(t, want[i].Prompt != "cut", x.Whole)
	}
}

func TestTapPassesResetsOn(t *testing.T) {
	s := New(t)
	ln, err := net.Listen("tcp", s.Addr(1, EnginePort))
	require.NoError(t, err)
	defer ln.Close()
	tap := s.Tap(1, ln.Addr().String())
	c, err := net.Dial("tcp", s.Addr(1, TapPort))
	require.NoError(t, err)
	engine, err := ln.Accept()
	require.NoError(t, err)
	defer engine.Close()
	const head = "POST / HTTP/1.1\r\n"
	fmt.Fprint(c, head)
	io.ReadFull(engine, make([]byte, len(head)))
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
	engine.SetReadDeadline(time.Now().Add(2 * time.Second))
	_, err = engine.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	assert.Empty(t, tap.Exchanges(), "no whole request has passed")
}

func TestProcess(t *testing.T) {
	s := New(t)
	p := s.Start("sh", nil, "/bin/sh", "-c", "echo started; trap 'echo ending; exit 3' TERM; while :; do sleep 0.01; done")
	assert.Equal(t, "started", p.WaitLine("^start", 5*time.Second))
	assert.True(t, p.Alive())
	assert.Equal(t, "exit 3", p.Term(5*time.Second))
	_, ok := p.Line("^ending$")
	assert.True(t, ok)

	p = s.Start("sleep", nil, "/bin/sh", "-c", "sleep 60 & wait")
	p.Kill()
	assert.Equal(t, "signal: killed", p.State())
	assert.Equal(t, s.Dir(), t.ArtifactDir())
}

func TestStagesDoNotMeet(t *testing.T) {
	a, b := New(t), New(t)
	assert.NotEqual(t, a.IP(1), b.IP(1))
	assert.Equal(t, a.Addr(2, GossipPort)+","+a.Addr(3, GossipPort), a.join(1))
	ln, err := net.Listen("tcp", a.Addr(250, ClientPort))
	require.NoError(t, err)
	ln.Close()
}

func TestFakeEngine(t *testing.T) {
	s := New(t)
	e := s.FakeEngine(1, "-decode-step", "2ms")
	var c Client
	defer c.Close()
	a := c.Do(t.Context(), e.URL, Chat{Model: e.Model, Prompt: "hello", MaxTokens: 5, Stream: true})
	require.NoError(t, a.Err)
	assert.Equal(t, "length", a.Finish)
	e.Fault(map[string]any{"kind": "reset", "after": 2})
	b := c.Do(t.Context(), e.URL, Chat{Model: e.Model, Prompt: "hello again", MaxTokens: 5, Stream: true})
	require.Error(t, b.Err)
	e.Kill()
	runs := s.Runs()
	require.Len(t, runs, 2)
	assert.Equal(t, "done", runs[0].Outcome)
	assert.Equal(t, "reset", runs[1].Outcome)
	assert.Equal(t, 5, runs[0].Tokens)
}

func TestTwice(t *testing.T) {
	run := func(engine, prompt string, from, to int64) (r Run) {
		r.Engine, r.PromptHash, r.Received, r.End = engine, prompt, from*1e9, to*1e9
		return r
	}
	assert.Empty(t, Twice([]Run{run("a", "x", 1, 5), run("b", "x", 5, 9), run("a", "y", 2, 8), run("b", "x", 3, 0)}, time.Second))
	assert.Len(t, Twice([]Run{run("b", "x", 3, 9), run("a", "x", 1, 5)}, time.Second), 1)
}
