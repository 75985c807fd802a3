package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// results collect what clients saw.
type results struct {
	mu     sync.Mutex
	ttft   []time.Duration
	sent   int
	errors int
	last   error
}

func (r *results) add(ttft time.Duration, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.errors++
		r.last = err
		return
	}
	r.ttft = append(r.ttft, ttft)
}

// summary returns mean, median and 99th percentile in ms, of the answered requests.
func (r *results) summary() (mean, p50, p99 float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ttft) == 0 {
		return 0, 0, 0
	}
	s := slices.Clone(r.ttft)
	slices.Sort(s)
	var sum time.Duration
	for _, d := range s {
		sum += d
	}
	at := func(q float64) float64 { return ms(s[min(int(math.Ceil(q*float64(len(s))))-1, len(s)-1)]) }
	return ms(sum / time.Duration(len(s))), at(0.5), at(0.99)
}

func (r *results) counts() (sent, answered, errors int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sent, len(r.ttft), r.errors
}

func ms(d time.Duration) float64 { return math.Round(float64(d)/float64(time.Millisecond)*10) / 10 }

// newClient makes the clients' side: many connections, none waited for.
func newClient() *http.Client {
	d := &net.Dialer{Timeout: 10 * time.Second}
	return &http.Client{Transport: &http.Transport{DialContext: d.DialContext, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 3 * time.Second, DisableCompression: true}}
}

// play sends each arrival at its time to the URL that target names, whatever became of the ones before, and returns when
// all are answered or ctx ends.
func play(ctx context.Context, list []arrival, target func(i int, a arrival) string, r *results) {
	client := newClient()
	defer client.CloseIdleConnections()
	start := time.Now()
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, a := range list {
		body := requestBody(a)
		timer := time.NewTimer(time.Until(start.Add(a.at)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		r.mu.Lock()
		r.sent++
		r.mu.Unlock()
		url := target(i, a)
		wg.Go(func() {
			ttft, err := ask(ctx, client, url, body)
			r.add(ttft, err)
		})
	}
}

func requestBody(a arrival) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	b, err := json.Marshal(struct {
		Model     string    `json:"model"`
		Messages  []message `json:"messages"`
		MaxTokens int       `json:"max_tokens"`
		IgnoreEOS bool      `json:"ignore_eos"`
		Stream    bool      `json:"stream"`
	}{modelName, []message{{"user", a.text()}}, a.output, true, true})
	if err != nil { // strings and numbers only
		panic(err)
	}
	return b
}

// ask makes one streamed chat and returns the time to the first content. Anything but a whole stream is an error.
func ask(ctx context.Context, client *http.Client, url string, body []byte) (ttft time.Duration, err error) {
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(res.Body, 512))
		return 0, fmt.Errorf("%s: %s", res.Status, bytes.TrimSpace(b))
	}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(make([]byte, 8<<10), 1<<20)
	finished := false
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		if bytes.Equal(data, []byte("[DONE]")) {
			if !finished || ttft == 0 {
				return 0, fmt.Errorf("stream ended without content or finish reason")
			}
			return ttft, nil
		}
		var chunk struct {
			Choices []struct {
				Delta        struct{ Content string }
				FinishReason *string `json:"finish_reason"`
			}
			Error json.RawMessage
		}
		if err := json.Unmarshal(data, &chunk); err != nil {
			return 0, fmt.Errorf("chunk %q: %w", data, err)
		}
		if len(chunk.Error) > 0 {
			return 0, fmt.Errorf("stream: %s", chunk.Error)
		}
		for _, c := range chunk.Choices {
			if c.Delta.Content != "" && ttft == 0 {
				ttft = time.Since(start)
			}
			finished = finished || c.FinishReason != nil && *c.FinishReason != "abort"
		}
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("stream ended early")
}
