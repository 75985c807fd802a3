package harness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

type ctx = context.Context

// Load keeps a number of clients busy, each with one chat at a time, until Stop.
type Load struct {
	Name    string // in request ids; needed where a test has several
	Model   string
	Workers int
	Streams float64         // share of requests that stream, 0..1
	Tokens  [2]int          // range of max_tokens
	Prompt  int             // bytes of prompt, about
	Free    bool            // streams can be continued
	Targets func() []string // base URLs to choose from, asked before each request; empty: wait
	Client  Client

	t      testing.TB
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	answers []Answer
}

// Run starts the clients. The stage's test ends them if nobody does before.
func (l *Load) Run(s *Stage) *Load {
	l.t = s.t
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	for w := range l.Workers {
		l.wg.Go(func() { l.work(w) })
	}
	s.t.Cleanup(func() {
		l.cancel(fmt.Errorf("the test is over"))
		l.wg.Wait()
		l.Client.Close()
	})
	return l
}

// work is one client. Its last request is not cut off by Stop but ends as it ends.
func (l *Load) work(w int) {
	rnd := rand.New(rand.NewPCG(uint64(w), 1))
	for i := 0; l.ctx.Err() == nil; i++ {
		targets := l.Targets()
		if len(targets) == 0 {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		chat := Chat{
			Model:     l.Model,
			Prompt:    fmt.Sprintf("client %d, request %d. %s", w, i, strings.Repeat("and so on ", l.Prompt/10)),
			MaxTokens: l.Tokens[0] + rnd.IntN(l.Tokens[1]-l.Tokens[0]+1),
			Stream:    rnd.Float64() < l.Streams,
			ID:        fmt.Sprintf("load%s-%d-%d", l.Name, w, i),
			Free:      l.Free,
		}
		limit, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		a := l.Client.Do(limit, targets[rnd.IntN(len(targets))], chat)
		cancel()
		l.mu.Lock()
		l.answers = append(l.answers, a)
		l.mu.Unlock()
	}
}

// Count is how many answers there are so far.
func (l *Load) Count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.answers)
}

// WaitMore waits until n more answers are there.
func (l *Load) WaitMore(n int, limit time.Duration) {
	l.t.Helper()
	from := l.Count()
	Eventually(l.t, limit, fmt.Sprintf("%d more answers", n), func() bool { return l.Count() >= from+n })
}

// Stop lets the requests under way end and returns all answers in the order of their start.
func (l *Load) Stop() []Answer {
	l.cancel(fmt.Errorf("stopped"))
	l.wg.Wait()
	slices.SortFunc(l.answers, func(a, b Answer) int { return a.Start.Compare(b.Start) })
	return l.answers
}

// Failures are the answers that are not whole.
func Failures(answers []Answer) (list []Answer) {
	for _, a := range answers {
		if a.Err != nil {
			list = append(list, a)
		}
	}
	return list
}

// Lost are the failures in which no content had come: those that the agents must prevent.
func Lost(answers []Answer) (list []Answer) {
	for _, a := range Failures(answers) {
		if a.Content == "" {
			list = append(list, a)
		}
	}
	return list
}

// String is a line for a failing test.
func (a Answer) String() string {
	kind := "plain"
	if a.Stream {
		kind = "stream"
	}
	return fmt.Sprintf("%s %s %s to %s, status %d, %d bytes of content, after %v: %v",
		a.Start.Format("15:04:05.000"), a.ID, kind, hostPort(a.Target), a.Status, len(a.Content), a.Total.Round(time.Millisecond), a.Err)
}

// Describe puts answers on lines, at most ten.
func Describe(answers []Answer) string {
	var b strings.Builder
	for i, a := range answers {
		if i == 10 {
			fmt.Fprintf(&b, "… and %d more\n", len(answers)-i)
			break
		}
		fmt.Fprintln(&b, a)
	}
	return b.String()
}

// Ready gives the base URLs of those agents whose /readyz is 200, looked up every interval in the background: what a
// balancer that heeds readiness would send to.
func (s *Stage) Ready(agents []*Agent, interval time.Duration) func() []string {
	var mu sync.Mutex
	var now []string
	look := func() {
		var list []string
		for _, a := range agents {
			if code, _ := a.Readyz(); code == 200 {
				list = append(list, a.URL)
			}
		}
		mu.Lock()
		now = list
		mu.Unlock()
	}
	look()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				look()
			}
		}
	}()
	s.t.Cleanup(func() { close(stop); <-done })
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(now)
	}
}
