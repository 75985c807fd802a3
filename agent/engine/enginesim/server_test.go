package enginesim

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pipes is an in-memory listener, for synctest.
type pipes struct {
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func newPipes() *pipes { return &pipes{ch: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.ch:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes", Net: "unix"} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	a, b := net.Pipe()
	select {
	case p.ch <- b:
		return a, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// harness is a server on pipes inside a bubble, with a client.
type harness struct {
	*Server
	t      *testing.T
	client *http.Client
}

// bubble runs a story in fake time with one server; when it is over nothing may be left at the engine.
func bubble(t *testing.T, cfg ServerConfig, story func(h *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, err := NewServer(cfg)
		require.NoError(t, err)
		l := newPipes()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { assert.NoError(t, s.Run(ctx)) })
		wg.Go(func() { assert.NoError(t, s.Serve(ctx, l)) })
		tr := &http.Transport{DialContext: l.dial}
		h := &harness{s, t, &http.Client{Transport: tr}}
		story(h)
		tr.CloseIdleConnections()
		synctest.Wait()
		st := s.Stats()
		assert.Zero(t, st.Running, "running at the end")
		assert.Zero(t, st.Waiting, "waiting at the end")
		assert.Zero(t, st.KVUsed, "KV tokens in use at the end")
		assert.Zero(t, st.Pending, "pending at the end")
		assert.Zero(t, st.Calls, "handlers at the end")
		assert.Empty(t, s.outputs)
		for _, o := range s.slots {
			assert.Nil(t, o, "slot")
		}
		cancel()
		wg.Wait()
	})
}

// reply is what a client saw.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // of reading the body
	first  time.Duration
	took   time.Duration
}

func (h *harness) do(ctx context.Context, method, path, body string) reply {
	begin := time.Now()
	req, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, strings.NewReader(body))
	require.NoError(h.t, err)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := h.client.Do(req)
	if err != nil {
		return reply{err: err, took: time.Since(begin)}
	}
	defer resp.Body.Close()
	r := reply{status: resp.StatusCode, header: resp.Header}
	in := bufio.NewReader(resp.Body)
	if _, err := in.Peek(1); err == nil {
		r.first = time.Since(begin)
	}
	b, err := io.ReadAll(in)
	r.body, r.err, r.took = string(b), err, time.Since(begin).Round(time.Microsecond)
	return r
}

func (h *harness) post(path, body string) reply {
	return h.do(h.t.Context(), "POST", path, body)
}

func (h *harness) get(path string) reply { return h.do(h.t.Context(), "GET", path, "") }

// stream is what a client makes of the events of a stream.
type stream struct {
	text, finish, id string
	events           int
	done             bool
	usage            map[string]any
	errorObject      map[string]any
}

func parse(t *testing.T, body string) (s stream) {
	t.Helper()
	for line := range strings.Lines(body) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			s.done = true
			continue
		}
		s.events++
		var c struct {
			ID      string
			Choices []struct {
				Delta struct {
					Content *string
				}
				Text         string
				FinishReason *string `json:"finish_reason"`
			}
			Usage map[string]any
			Error map[string]any
		}
		require.NoError(t, json.Unmarshal([]byte(data), &c), data)
		if c.ID != "" {
			s.id = c.ID
		}
		if c.Error != nil {
			s.errorObject = c.Error
		}
		if c.Usage != nil {
			s.usage = c.Usage
		}
		for _, ch := range c.Choices {
			s.text += ch.Text
			if ch.Delta.Content != nil {
				s.text += *ch.Delta.Content
			}
			if ch.FinishReason != nil {
				s.finish = *ch.FinishReason
			}
		}
	}
	return s
}

func TestStreamChat(t *testing.T) {
	for _, dialect := range []string{"vllm", "sglang", "llamacpp"} {
		t.Run(dialect, func(t *testing.T) {
			bubble(t, ServerConfig{Dialect: dialect}, func(h *harness) {
				r := h.post("/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"Say hello"}],"max_tokens":10,"stream":true,"stream_options":{"include_usage":true}}`)
				require.NoError(t, r.err)
				s := parse(t, r.body)
				t.Log(r.header, r.body)
				assert.True(t, s.done)
				assert.Len(t, s.text, 40)
				assert.Equal(t, "length", s.finish)
				assert.EqualValues(t, 10, s.usage["completion_tokens"])
				assert.Equal(t, 200*time.Millisecond, r.took)
			})
		})
	}
}
