package faultsim

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// answer is what a client got.
type answer struct {
	q       *request
	entry   int // agent that took the connection; -1 = none listens
	began   time.Time
	ended   time.Time
	gaveUp  time.Time // its own hang-up
	status  int
	reason  string // x-grapevine-reason
	retry   string
	text    string
	errBody string        // an error object, in the body or in an event
	whole   bool          // it ended as a whole answer does
	err     error         // of the connection
	odd     string        // something that no answer may have
	used    int           // completion_tokens; -1 = not told
	late    bool          // it never ended
	firstAt time.Time     // its first content came
	gap     time.Duration // longest time between two events with content
	lastAt  time.Time
}

func (q *request) path() string {
	if q.chat {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

func (q *request) body(stream bool) string {
	m := map[string]any{"model": model, "max_tokens": q.max, "stream": stream, "temperature": 0}
	if stream && q.usage {
		m["stream_options"] = map[string]any{"include_usage": true}
	}
	if q.chat {
		m["messages"] = []any{map[string]any{"role": "user", "content": q.prompt}}
	} else {
		m["prompt"] = q.prompt
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// patience is how long a client waits at all. It is far beyond the sum of the agents' limits: three attempts with their
// waits for gate and first byte, a keep-alive time for each that stands still, and the silences of a stream.
const patience = 150 * time.Second

// send carries one request out.
func (f *fleet) send(q *request) *answer {
	a := &answer{q: q, entry: -1, began: time.Now(), used: -1}
	defer func() { a.ended = time.Now() }()
	var c net.Conn
	for i := range f.hosts {
		h := f.hosts[(q.entry+i)%len(f.hosts)]
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		x, err := f.net.dial(ctx, clientHost, h.ip+":8080")
		cancel()
		if err == nil {
			c, a.entry = x, h.i
			break
		}
	}
	if c == nil {
		a.err = errors.New("nobody listens")
		return a
	}
	var gone, late atomic.Bool
	if q.hangUp > 0 {
		t := time.AfterFunc(q.hangUp, func() { gone.Store(true); a.gaveUp = time.Now(); _ = c.Close() })
		defer t.Stop()
	}
	t := time.AfterFunc(patience, func() { late.Store(true); _ = c.Close() })
	defer t.Stop()
	defer func() { _ = c.Close() }()
	body := q.body(q.stream)
	head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: fleet\r\nContent-Type: application/json\r\nContent-Length: %d\r\nX-Request-Id: %s\r\n", q.path(), len(body), q.id)
	if q.deadline > 0 {
		head += fmt.Sprintf("X-Request-Timeout: %.3f\r\n", q.deadline.Seconds())
	}
	if q.class != "" {
		head += "X-Grapevine-Priority: " + q.class + "\r\n"
	}
	if q.idempotent {
		head += "Idempotency-Key: " + q.id + "\r\n"
	}
	if _, err := io.WriteString(c, head+"\r\n"+body); err != nil {
		a.err = err
	} else {
		a.read(c)
	}
	a.late = late.Load()
	if !gone.Load() {
		a.gaveUp = time.Time{}
	}
	return a
}

// read reads the answer.
func (a *answer) read(c net.Conn) {
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: "POST"})
	if err != nil {
		a.err = err
		return
	}
	defer func() { _ = resp.Body.Close() }()
	a.status, a.reason, a.retry = resp.StatusCode, resp.Header.Get("X-Grapevine-Reason"), resp.Header.Get("Retry-After")
	if a.status == 200 && a.q.stream {
		a.readStream(resp.Body)
		return
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		a.err = err
		return
	}
	if a.status != 200 {
		a.errBody = string(b)
		return
	}
	if a.text, err = wholeText(b, a.q.chat); err != nil {
		a.odd = err.Error()
		return
	}
	if strings.Contains(string(b), `"finish_reason":"abort"`) {
		a.errBody = "abort" // the engine's own words, passed on unchanged
		return
	}
	a.whole = true
}

// choice has the parts of an answer's choice, of both APIs, streamed or not.
type choice struct {
	Text    string `json:"text"`
	Delta   *struct{ Role, Content string }
	Message *struct{ Content string }
	Finish  string `json:"finish_reason"`
}

type event struct {
	ID      string
	Error   json.RawMessage
	Choices []choice
	Usage   *struct {
		Completion int `json:"completion_tokens"`
	}
}

// readStream reads events until the end, and notes what no stream may have.
func (a *answer) readStream(body io.Reader) {
	var ids, roles, finishes, dones int
	var id string
	var text strings.Builder
	r := bufio.NewReader(body)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			if !errors.Is(err, io.EOF) {
				a.err = err
			}
			break
		}
		doc, ok := strings.CutPrefix(strings.TrimSpace(line), "data:")
		if !ok {
			continue
		}
		doc = strings.TrimSpace(doc)
		if dones > 0 {
			a.odd = "an event behind [DONE]"
		}
		if doc == "[DONE]" {
			dones++
			continue
		}
		var e event
		if err := json.Unmarshal([]byte(doc), &e); err != nil {
			a.odd = fmt.Sprintf("event %q: %v", doc, err)
			continue
		}
		if len(e.Error) > 0 && string(e.Error) != "null" {
			a.errBody = doc
			continue
		}
		if e.ID != id {
			id = e.ID
			ids++
		}
		if e.Usage != nil {
			a.used = e.Usage.Completion
		}
		for _, c := range e.Choices {
			if c.Text != "" || c.Delta != nil && c.Delta.Content != "" {
				a.content()
			}
			if finishes > 0 && (c.Text != "" || c.Delta != nil && c.Delta.Content != "") {
				a.odd = "content behind the finish reason"
			}
			text.WriteString(c.Text)
			if c.Delta != nil {
				text.WriteString(c.Delta.Content)
				if c.Delta.Role != "" {
					roles++
				}
			}
			if c.Finish != "" {
				finishes++
			}
			if c.Finish == "abort" {
				a.odd = "finish reason abort"
			}
		}
	}
	a.text = text.String()
	a.whole = a.err == nil && dones == 1 && finishes == 1 && a.errBody == ""
	switch {
	case a.odd != "":
	case ids > 1:
		a.odd = fmt.Sprintf("%d ids in one stream", ids)
	case finishes > 1:
		a.odd = fmt.Sprintf("%d finish reasons", finishes)
	case roles > 1 && a.q.chat:
		a.odd = fmt.Sprintf("%d roles", roles)
	case a.err == nil && !a.whole:
		a.odd = fmt.Sprintf("a clean end without a whole answer: finish %d, done %d, error %q", finishes, dones, a.errBody)
	}
}

// content notes that some came.
func (a *answer) content() {
	now := time.Now()
	if a.firstAt.IsZero() {
		a.firstAt = now
	} else {
		a.gap = max(a.gap, now.Sub(a.lastAt))
	}
	a.lastAt = now
	if a.q.slow > 0 {
		time.Sleep(a.q.slow)
	}
}

// wholeText is the text of an answer that is not streamed.
func wholeText(b []byte, chat bool) (string, error) {
	var e event
	if err := json.Unmarshal(b, &e); err != nil {
		return "", fmt.Errorf("%w in %q", err, b)
	}
	if len(e.Choices) != 1 || chat && e.Choices[0].Message == nil {
		return "", fmt.Errorf("no choice in %q", b)
	}
	if chat {
		return e.Choices[0].Message.Content, nil
	}
	return e.Choices[0].Text, nil
}
