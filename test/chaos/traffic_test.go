package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// ask is one request of the load.
type ask struct {
	n        int
	eligible bool // a text stream that can be continued
	stream   bool
	prompt   string
	tokens   int
	priority string
}

func (q ask) body() []byte {
	m := map[string]any{"model": harness.FakeModel, "max_tokens": q.tokens, "messages": []any{map[string]any{"role": "user", "content": q.prompt}}}
	if q.stream {
		m["stream"] = true
	}
	if !q.eligible {
		m["seed"] = 1 // on no list: a broken one cannot go on
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return b
}

// reply is what became of an ask.
type reply struct {
	ask
	entry  string
	start  time.Time
	ttft   time.Duration // 0 = no content came
	total  time.Duration
	text   string
	status int
	retry  string // Retry-After
	tries  int    // of the client
	err    error  // nil = whole
}

// group is a part of the load: workers that send one request after another.
type group struct {
	name    string
	workers int
	targets func() []string // base URLs
	repeats int             // by the client, as official clients do: after errors without content, at another address
	rate    float64         // requests/s of each worker; 0 = the next one follows the last
	tokens  [2]int
	prompt  int // bytes
	ask     func(q *ask)

	mu      sync.Mutex
	replies []reply
}

var transport = &http.Transport{MaxIdleConnsPerHost: 256, IdleConnTimeout: 30 * time.Second, DisableCompression: true}

var asked atomic.Int64 // over all groups, so that prompts and ids are unique

// load runs groups until stop.
type load struct {
	groups []*group
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup
}

func startLoad(groups ...*group) *load {
	l := &load{groups: groups}
	l.ctx, l.stop = context.WithCancel(context.Background())
	for _, g := range groups {
		if g.tokens == [2]int{} {
			g.tokens = [2]int{20, 80}
		}
		if g.prompt == 0 {
			g.prompt = 800
		}
		for w := range g.workers {
			l.wg.Go(func() { g.work(l.ctx, w) })
		}
	}
	return l
}

// end lets what is under way finish and returns all replies.
func (l *load) end() (all []reply) {
	l.stop()
	l.wg.Wait()
	for _, g := range l.groups {
		all = append(all, g.replies...)
	}
	return all
}

func (g *group) work(ctx context.Context, w int) {
	rnd := rand.New(rand.NewPCG(uint64(w), uint64(len(g.name))))
	next := time.Now().Add(time.Duration(rnd.Float64() * 0.3 * float64(time.Second)))
	for ctx.Err() == nil {
		if g.rate > 0 {
			select {
			case <-time.After(time.Until(next)):
			case <-ctx.Done():
				return
			}
			next = next.Add(time.Duration(rnd.ExpFloat64() / g.rate * float64(time.Second)))
		}
		targets := g.targets()
		if len(targets) == 0 {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		n := int(asked.Add(1))
		q := ask{n: n, tokens: g.tokens[0] + rnd.IntN(g.tokens[1]-g.tokens[0]+1)}
		q.prompt = fmt.Sprintf("%s %d. %s", g.name, n, strings.Repeat("and so on ", g.prompt/10))
		switch x := rnd.Float64(); {
		case x < 0.8:
			q.eligible, q.stream = true, true
		case x < 0.9:
			q.stream = true
		}
		if g.ask != nil {
			g.ask(&q)
		}
		r := reply{ask: q, start: time.Now()}
		for r.tries = 1; ; r.tries++ {
			r.entry = targets[rnd.IntN(len(targets))]
			r.do()
			if r.err == nil || r.text != "" || r.tries > g.repeats {
				break
			}
			time.Sleep(time.Duration(float64(500*time.Millisecond<<(r.tries-1)) * (0.75 + rnd.Float64()/4)))
			targets = g.targets()
		}
		r.total = time.Since(r.start)
		g.mu.Lock()
		g.replies = append(g.replies, r)
		g.mu.Unlock()
	}
}

// do sends the request once and reads the answer to its end.
func (r *reply) do() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	r.text, r.err, r.status = "", nil, 0
	id := fmt.Sprintf("chaos-%d-%d", r.n, r.tries)
	if !r.stream {
		r.err = r.plain(ctx, id)
		return
	}
	var finish string
	req := newRequest(ctx, r.entry, r.body(), id, r.ask)
	r.text, finish, r.err = streamRequest(req, func(n int, _ string) {
		if n == 1 {
			r.ttft = time.Since(r.start)
		}
	}, func(resp *http.Response) { r.status, r.retry = resp.StatusCode, resp.Header.Get("Retry-After") })
	if r.err == nil && finish == "" {
		r.err = fmt.Errorf("no finish reason")
	}
}

func newRequest(ctx context.Context, base string, body []byte, id string, q ask) *http.Request {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		panic(err) // the URL is ours
	}
	req.GetBody = nil // no silent repeats by net/http
	req.Header.Set("Content-Type", "application/json")
	if id != "" {
		req.Header.Set("X-Request-Id", id)
	}
	if q.priority != "" {
		req.Header.Set("X-Grapevine-Priority", q.priority)
	}
	return req
}

func (r *reply) plain(ctx context.Context, id string) error {
	resp, err := transport.RoundTrip(newRequest(ctx, r.entry, r.body(), id, r.ask))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	r.status, r.retry = resp.StatusCode, resp.Header.Get("Retry-After")
	var m struct {
		Choices []struct {
			Message struct{ Content string }
			Finish  string `json:"finish_reason"`
		}
	}
	if resp.StatusCode != http.StatusOK {
		var b bytes.Buffer
		_, _ = b.ReadFrom(resp.Body)
		return fmt.Errorf("status %d: %s", resp.StatusCode, b.String())
	}
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		return err
	}
	if len(m.Choices) != 1 || m.Choices[0].Finish == "" || m.Choices[0].Finish == "abort" {
		return fmt.Errorf("no whole answer: %+v", m)
	}
	r.text = m.Choices[0].Message.Content
	return nil
}
