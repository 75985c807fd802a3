package harness

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// Chat is a request as a client means it.
type Chat struct {
	Model     string
	Prompt    string
	MaxTokens int
	Stream    bool
	ID        string // x-request-id
	Free      bool   // no seed: a broken stream can be continued
}

// Body is the JSON that goes out.
func (c Chat) Body() []byte {
	m := map[string]any{
		"model":      c.Model,
		"messages":   []any{map[string]any{"role": "user", "content": c.Prompt}},
		"max_tokens": c.MaxTokens,
	}
	if !c.Free {
		m["seed"] = 1
	}
	if c.Stream {
		m["stream"] = true
		m["stream_options"] = map[string]any{"include_usage": true}
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return b
}

// Answer is what a client got for a chat.
type Answer struct {
	Chat
	Target  string
	Status  int
	Header  http.Header
	Body    []byte
	Content string // the text of all deltas, or of the message
	Finish  string // finish_reason
	Start   time.Time
	First   time.Duration // until the first content; zero if none came
	Total   time.Duration
	Err     error // nil only for an answer that is whole: framing, JSON, finish reason, and [DONE] if streamed
}

// Client sends chats. It does not retry: an error is an error. Its zero value uses its own connections.
type Client struct {
	// Hosts maps a host name to several addresses, tried in random order until one accepts, as clients do with DNS.
	Hosts map[string][]string

	transport atomic.Pointer[http.Transport]
}

func (c *Client) rt() *http.Transport {
	if t := c.transport.Load(); t != nil {
		return t
	}
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	t := &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second, DisableCompression: true}
	t.DialContext = func(ctx ctx, network, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		list := c.Hosts[host]
		if list == nil {
			return dialer.DialContext(ctx, network, addr)
		}
		for _, i := range rand.Perm(len(list)) {
			var conn net.Conn
			if conn, err = dialer.DialContext(ctx, network, net.JoinHostPort(list[i], port)); err == nil {
				return conn, nil
			}
		}
		return nil, err
	}
	if !c.transport.CompareAndSwap(nil, t) {
		return c.transport.Load()
	}
	return t
}

// Close ends idle connections.
func (c *Client) Close() { c.rt().CloseIdleConnections() }

// Do sends a chat to the agent at base and reads the answer to its end.
func (c *Client) Do(ctx ctx, base string, chat Chat) (a Answer) {
	a = Answer{Chat: chat, Target: base, Start: time.Now()}
	defer func() { a.Total = time.Since(a.Start) }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", bytes.NewReader(chat.Body()))
	if err != nil {
		a.Err = err
		return a
	}
	req.GetBody = nil // no silent repeats by net/http
	req.Header.Set("Content-Type", "application/json")
	if chat.ID != "" {
		req.Header.Set("X-Request-Id", chat.ID)
	}
	resp, err := c.rt().RoundTrip(req)
	if err != nil {
		a.Err = err
		return a
	}
	defer resp.Body.Close()
	a.read(resp)
	return a
}

// read takes the answer in and judges whether it is whole.
func (a *Answer) read(resp *http.Response) {
	a.Status, a.Header = resp.StatusCode, resp.Header
	if a.Status != http.StatusOK {
		a.Body, _ = io.ReadAll(resp.Body)
		a.Err = fmt.Errorf("status %d: %s", a.Status, bytes.TrimSpace(a.Body))
		return
	}
	if !a.Stream {
		if a.Body, a.Err = io.ReadAll(resp.Body); a.Err == nil {
			a.Err = a.message(a.Body)
		}
		return
	}
	done := false
	var all bytes.Buffer
	lines := bufio.NewReader(io.TeeReader(resp.Body, &all))
	for {
		line, err := lines.ReadString('\n')
		if data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data:"); ok {
			if data = strings.TrimSpace(data); data == "[DONE]" {
				done = true
			} else if err := a.message([]byte(data)); err != nil && a.Err == nil {
				a.Err = err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			a.Body, a.Err = all.Bytes(), err
			return
		}
	}
	a.Body = all.Bytes()
	switch {
	case a.Err != nil:
	case !done:
		a.Err = fmt.Errorf("the stream ended without [DONE] after %d bytes", len(a.Body))
	case a.Finish == "":
		a.Err = fmt.Errorf("the stream has no finish_reason")
	}
}

// message takes in one JSON object: an answer, or a chunk of one.
func (a *Answer) message(b []byte) error {
	var m struct {
		Error   json.RawMessage
		Choices []struct {
			Delta, Message struct{ Content *string }
			Finish         *string `json:"finish_reason"`
		}
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return fmt.Errorf("%w in %q", err, b)
	}
	if len(m.Error) > 0 && string(m.Error) != "null" {
		return fmt.Errorf("error in the answer: %s", m.Error)
	}
	for _, c := range m.Choices {
		for _, text := range []*string{c.Delta.Content, c.Message.Content} {
			if text != nil && *text != "" {
				if a.First == 0 {
					a.First = time.Since(a.Start)
				}
				a.Content += *text
			}
		}
		if c.Finish != nil {
			a.Finish = *c.Finish
		}
	}
	if !a.Stream && a.Finish == "" {
		return fmt.Errorf("no finish_reason in %q", b)
	}
	return nil
}

// hostPort is the address in a base URL.
func hostPort(base string) string {
	u, err := url.Parse(base)
	if err != nil {
		panic(err)
	}
	return u.Host
}
