package engines

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/require"
)

// stream is one client with a long answer under way.
type stream struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	tokens int // data lines with content
	err    error
}

// open sends a chat for n tokens that the model may not end before. The answer is read until it ends or is cancelled.
func open(t *testing.T, base, model string, n int, streamed bool) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s := &stream{cancel: cancel, done: make(chan struct{})}
	body, err := json.Marshal(map[string]any{"model": model, "max_tokens": n, "ignore_eos": true, "stream": streamed,
		"messages": []any{map[string]any{"role": "user", "content": "Tell a long story about a vine that grows around the world."}}})
	require.NoError(t, err)
	go func() {
		defer close(s.done)
		err := s.read(ctx, base, body)
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
	}()
	t.Cleanup(func() { cancel(); <-s.done })
	return s
}

func (s *stream) read(ctx context.Context, base string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	tr := &http.Transport{DisableKeepAlives: true}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		if strings.Contains(lines.Text(), `"content":"`) {
			s.mu.Lock()
			s.tokens++
			s.mu.Unlock()
		}
	}
	return lines.Err()
}

func (s *stream) begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tokens > 0
}

func (s *stream) over() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// post sends a JSON body and returns status and answer.
func post(t *testing.T, url string, body any) (int, string) {
	t.Helper()
	b, err := json.Marshal(body)
	require.NoError(t, err)
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Minute}
	res, err := c.Post(url, "application/json", bytes.NewReader(b))
	require.NoError(t, err)
	defer res.Body.Close()
	out, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(out)
}

// gauge adds up the samples of a metric on the engine's own page, read without any code of the product.
func gauge(t *testing.T, url string, names ...string) (sum float64, found bool) {
	t.Helper()
	code, page := harness.Get(url + "/metrics")
	if code != http.StatusOK {
		return 0, false
	}
	for line := range strings.Lines(page) {
		for _, n := range names {
			rest, ok := strings.CutPrefix(line, n)
			if !ok || rest[0] != '{' && rest[0] != ' ' {
				continue
			}
			f := strings.Fields(line)
			v, err := strconv.ParseFloat(f[len(f)-1], 64)
			require.NoError(t, err, line)
			sum, found = sum+v, true
		}
	}
	return sum, found
}

// page is the part of /status that these tests look at.
type page struct {
	State  string
	Ready  bool
	Engine struct {
		Kind, Version, Health, Evidence, Error string
		Models, Serves                         []string
		Running, Waiting                       *int
		Outside                                int
		Restarts                               int
		Readings                               []reading
		Learned                                []struct {
			Model         string
			Answers       int
			BytesPerToken *float64 `json:"bytes_per_token"`
		}
	}
	Peers []struct {
		Node, State      string
		Self             bool
		Running, Waiting *int
		Models           []string
	}
}

type reading struct {
	Name, Page, Metric, Why string
	Value                   *float64
	AgeMS                   *int64 `json:"age_ms"`
}

func status(t *testing.T, a *harness.Agent) (p page) {
	t.Helper()
	code, body := harness.Get(a.Status + "/status")
	require.Equal(t, http.StatusOK, code, body)
	require.NoError(t, json.Unmarshal([]byte(body), &p), body)
	return p
}

func (p *page) reading(name string) reading {
	for _, r := range p.Engine.Readings {
		if r.Name == name {
			return r
		}
	}
	return reading{}
}

// modelIDs are the names in an agent's model list.
func modelIDs(t *testing.T, base string) (ids []string, body string) {
	t.Helper()
	code, body := harness.Get(base + "/v1/models")
	require.Equal(t, http.StatusOK, code, body)
	var list struct{ Data []struct{ ID string } }
	require.NoError(t, json.Unmarshal([]byte(body), &list))
	for _, m := range list.Data {
		ids = append(ids, m.ID)
	}
	return ids, body
}
