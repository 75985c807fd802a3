package hostile

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// oddEngine answers a request whose query is "odd" with the bytes of the case, and every other one with "second".
type oddEngine struct {
	backend
	now atomic.Pointer[oddRequest]
}

func newOddEngine(t *testing.T) *oddEngine {
	t.Helper()
	e := &oddEngine{}
	e.addr = acceptAll(t, e.serve)
	return e
}

func (e *oddEngine) serve(c net.Conn) {
	defer c.Close()
	br := bufio.NewReader(c)
	for {
		r, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		_ = c.SetReadDeadline(time.Time{})
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		answer, end := []byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n\"second\""), false
		if strings.Contains(r.RequestURI, "odd") {
			answer, end = e.now.Load().bytes, e.now.Load().half
		}
		if _, err := c.Write(answer); err != nil || end {
			return
		}
		_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond)) // who waits for more gets the end
	}
}

// relayed is what a client sees of one odd answer through one front.
type relayed struct {
	status   int    // 0 none
	body     string // as far as it came
	cut      bool   // the body did not end as it should
	waits    bool   // nothing more came in time
	ours     string // a field of ours that was let through
	poisoned string // what the next request got instead of its own answer
}

// passed: the client has an answer of the engine, and thinks it whole.
func (r relayed) passed() bool { return r.status > 0 && r.status < 502 && !r.cut && !r.waits }

func (r relayed) String() string {
	s := "closes"
	switch {
	case r.waits:
		s = fmt.Sprintf("waits, %d", r.status)
	case r.cut:
		s = fmt.Sprintf("cuts, %d", r.status)
	case r.passed():
		s = fmt.Sprintf("passes, %d", r.status)
	case r.status > 0:
		s = fmt.Sprintf("refuses, %d", r.status)
	}
	if r.poisoned != "" {
		s += ", next answer is another"
	}
	return s
}

// What engines answer, as a table: grapevine, net/http, nginx and HAProxy (with -long Envoy) between them and a client. It fails
// where grapevine passes as whole what two of the three others do not, where the next request on a connection gets what was
// not meant for it, and where a field of ours comes through.
func TestDifferentialAnswers(t *testing.T) {
	corpus := readCorpus(t, "answers")
	starts := []struct {
		name  string
		start func(*testing.T, *backend) string
	}{{"grapevine", startGrapevine}, {"net/http", startNetHTTP}, {"nginx", startNginx}, {"haproxy", startHAProxy}}
	if *long {
		starts = append(starts, struct {
			name  string
			start func(*testing.T, *backend) string
		}{"envoy", startEnvoy})
	}
	var names []string
	var results [][]relayed
	var wg sync.WaitGroup
	for _, s := range starts {
		got := make([]relayed, len(corpus))
		for lane := range lanes {
			e := newOddEngine(t)
			addr := s.start(t, &e.backend)
			if addr == "" {
				t.Logf("not installed, so not compared: %s", s.name)
				break
			}
			if lane == 0 {
				names, results = append(names, s.name), append(results, got)
			}
			wg.Go(func() {
				for j := lane; j < len(corpus); j += lanes {
					if s.name == "grapevine" { // a new one each time: it would eject such an engine
						e = newOddEngine(t)
						addr = s.start(t, &e.backend)
					}
					e.now.Store(&corpus[j])
					got[j] = relay(addr, corpus[j].method)
				}
			})
		}
	}
	wg.Wait()

	require.True(t, results[0][0].passed(), "the first case is an ordinary answer: %s", results[0][0])
	var table strings.Builder
	fmt.Fprintf(&table, "| answer | %s |\n|---|%s\n", strings.Join(names, " | "), strings.Repeat("---|", len(names)))
	for j, c := range corpus {
		refused := 0
		fmt.Fprintf(&table, "| %s |", c.name)
		for i := range names {
			fmt.Fprintf(&table, " %s |", results[i][j])
			if i > 0 && names[i] != "envoy" && !results[i][j].passed() {
				refused++
			}
		}
		table.WriteByte('\n')
		ours := results[0][j]
		if ours.passed() {
			assert.Less(t, refused, 2, "%s: grapevine %s, and %d others do not", c.name, ours, refused)
			assert.Contains(t, []string{"", "{}"}, ours.body, c.name)
			assert.Empty(t, ours.ours, "%s: a field of ours from an engine", c.name)
		}
		assert.Empty(t, ours.poisoned, "%s: the next request's answer", c.name)
		assert.False(t, ours.waits && ours.status == 0, "%s: neither passed nor refused", c.name)
	}
	t.Logf("%d answers\n%s", len(corpus), table.String())
	if file := os.Getenv("HOSTILE_ANSWERS"); file != "" {
		require.NoError(t, os.WriteFile(file, []byte(table.String()), 0o644))
	}
}

// relay asks for the odd answer, and then for another one, on the same connection if it is still there.
func relay(addr, method string) (out relayed) {
	var nc net.Conn
	var br *bufio.Reader
	ask := func(method, query string) (*http.Response, error) {
		if nc == nil {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return nil, err
			}
			nc, br = c, bufio.NewReader(c)
		}
		_ = nc.SetDeadline(time.Now().Add(2 * time.Second))
		head := fmt.Sprintf("%s /v1/chat/completions?%s HTTP/1.1\r\nHost: llm.example\r\n", method, query)
		if method == "HEAD" {
			head += "\r\n"
		} else {
			head += "Content-Length: 13\r\n\r\n{\"model\":\"m\"}"
		}
		if _, err := io.WriteString(nc, head); err != nil {
			return nil, err
		}
		for {
			resp, err := http.ReadResponse(br, &http.Request{Method: method})
			if err != nil || resp.StatusCode >= 200 || resp.StatusCode == 101 {
				return resp, err
			}
			for name := range resp.Header {
				if strings.HasPrefix(name, "X-Grapevine-") {
					out.ours = name
				}
			}
		}
	}
	late := func(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
	resp, err := ask(method, "odd")
	over := err != nil
	if err != nil {
		out.waits = late(err)
	} else {
		out.status = resp.StatusCode
		b, err := io.ReadAll(resp.Body)
		out.body, out.waits = string(b), late(err)
		out.cut = err != nil && !out.waits
		over = err != nil || resp.Close || resp.StatusCode == 101
		for _, h := range []http.Header{resp.Header, resp.Trailer} {
			for name := range h {
				if strings.HasPrefix(name, "X-Grapevine-") {
					out.ours = name
				}
			}
		}
	}
	if over {
		if nc != nil {
			_ = nc.Close()
		}
		nc = nil
	}
	if resp, err := ask("POST", "second"); err == nil {
		if b, _ := io.ReadAll(resp.Body); resp.StatusCode == 200 && string(b) != `"second"` {
			out.poisoned = string(b)
		}
	}
	if nc != nil {
		_ = nc.Close()
	}
	return out
}
