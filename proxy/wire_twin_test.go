package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// twinFront serves one proxy on a loopback socket: by our own HTTP/1.1, or by net/http.
func twinFront(t *testing.T, std bool) (addr string, engine *twinEngine) {
	t.Helper()
	engine = &twinEngine{gone: make(chan struct{}, 16)}
	u := listenEngine(t, engine)
	tab := routing.NewTable(routing.Member{Boot: 1, Node: "a", Addr: "127.0.0.1:1"})
	pol, err := routing.NewPolicy("local")
	require.NoError(t, err)
	p, err := New(Config{Table: tab, Policy: pol, EngineURL: u, std: std})
	require.NoError(t, err)
	tab.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
	tab.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady, Heartbeat: time.Hour}, time.Now())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := NewServer(p.ClientHandler(), nil, nil)
	if std {
		go func() { _ = s.Serve(l) }()
		t.Cleanup(func() { _ = s.Close() })
	} else {
		w := p.ClientServer(s)
		go func() { _ = w.Serve(l) }()
		t.Cleanup(func() { _ = w.Close() })
	}
	return l.Addr().String(), engine
}

// twinEngine answers by what the path's query says.
type twinEngine struct{ gone chan struct{} }

func (e *twinEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	q, _ := url.ParseQuery(r.URL.RawQuery)
	switch q.Get("do") {
	case "stream":
		eventHead(w)
		say(w, chunk("a"))
		say(w, chunk("b"))
		say(w, finishChunk+doneChunk)
	case "hang":
		<-r.Context().Done()
		e.gone <- struct{}{}
	case "begin":
		eventHead(w)
		say(w, chunk("a"))
		<-r.Context().Done()
		e.gone <- struct{}{}
	case "empty":
		w.WriteHeader(http.StatusNoContent)
	case "large":
		w.Header().Set("Content-Type", "text/plain")
		_, _ = w.Write([]byte(strings.Repeat("0123456789abcdef", 20_000)))
	default:
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"method":%q,"length":%d,"body_starts":%q}`, r.Method, len(b), string(b[:min(len(b), 40)]))
	}
}

// twinAnswer is what must be the same through both fronts.
type twinAnswer struct {
	Status int
	Header string
	Body   string
}

// twinFields may differ: clocks, ids, and how net/http says what goes without saying.
var twinFields = []string{"Date", "X-Request-Id", "Connection", "Content-Length", "Transfer-Encoding"}

// talk sends raw bytes over one connection and reads answers until n have come or it ends; closed tells that it did end.
func talk(t *testing.T, addr, raw string, methods ...string) (out []twinAnswer, interim int, closed bool) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	go func() { _, _ = io.WriteString(c, raw) }()
	r := bufio.NewReader(c)
	for _, m := range methods {
		resp, err := http.ReadResponse(r, &http.Request{Method: m})
		for err == nil && resp.StatusCode == 100 {
			interim++
			resp, err = http.ReadResponse(r, &http.Request{Method: m})
		}
		if err != nil {
			break
		}
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		for _, f := range twinFields {
			resp.Header.Del(f)
		}
		var h strings.Builder
		require.NoError(t, resp.Header.Write(&h)) // sorted
		out = append(out, twinAnswer{resp.StatusCode, h.String(), string(b)})
	}
	_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	_, err = r.ReadByte()
	var ne net.Error
	closed = err != nil && !(asNetError(err, &ne) && ne.Timeout())
	return out, interim, closed
}

func asNetError(err error, ne *net.Error) bool {
	e, ok := err.(net.Error)
	*ne = e
	return ok
}

// The same requests through both fronts have the same answers and leave the connection in the same state.
func TestTwinFronts(t *testing.T) {
	post := func(query, extra, body string) string {
		return fmt.Sprintf("POST %s%s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s",
			chatPath, query, len(body), extra, body)
	}
	body := `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	streamed := `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`
	large := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 700<<10) + `"}]}`
	chunked := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n",
		chatPath, 10, body[:10], len(body)-10, body[10:])
	for name, c := range map[string]struct {
		raw     string
		methods []string
		want    []int
		closed  bool
		interim int
	}{
		"one":             {post("", "", body), []string{"POST"}, []int{200}, false, 0},
		"kept":            {post("", "", body) + post("?do=stream", "", streamed) + post("", "", body), []string{"POST", "POST", "POST"}, []int{200, 200, 200}, false, 0},
		"close":           {post("", "Connection: close\r\n", body), []string{"POST"}, []int{200}, true, 0},
		"stream":          {post("?do=stream", "", streamed), []string{"POST"}, []int{200}, false, 0},
		"large answer":    {post("?do=large", "", body), []string{"POST"}, []int{200}, false, 0},
		"large prompt":    {post("", "", large), []string{"POST"}, []int{200}, false, 0},
		"no content":      {post("?do=empty", "", body), []string{"POST"}, []int{204}, false, 0},
		"chunked upload":  {chunked + post("", "", body), []string{"POST", "POST"}, []int{200, 200}, false, 0},
		"expect":          {post("", "Expect: 100-continue\r\n", body), []string{"POST"}, []int{200}, false, 1},
		"head":            {"HEAD /v1/files HTTP/1.1\r\nHost: h\r\n\r\n" + post("", "", body), []string{"HEAD", "POST"}, []int{200, 200}, false, 0},
		"1.0":             {strings.Replace(post("", "", body), "HTTP/1.1", "HTTP/1.0", 1), []string{"POST"}, []int{200}, true, 0},
		"path":            {"POST /sleep HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n", []string{"POST"}, []int{404}, false, 0},
		"no host":         {"GET /v1/models HTTP/1.1\r\n\r\n", []string{"GET"}, []int{400}, true, 0},
		"two lengths":     {"POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", []string{"POST"}, []int{400}, true, 0},
		"bad chunk":       {"POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", []string{"POST"}, []int{400}, true, 0},
		"space in a name": {"GET /v1/models HTTP/1.1\r\nHost: h\r\nA b: c\r\n\r\n", []string{"GET"}, []int{400}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var got [2][]twinAnswer
			for i, std := range []bool{false, true} {
				addr, _ := twinFront(t, std)
				var interim int
				var closed bool
				got[i], interim, closed = talk(t, addr, c.raw, c.methods...)
				var status []int
				for _, a := range got[i] {
					status = append(status, a.Status)
				}
				require.Equal(t, c.want, status, "std %v", std)
				if !std || c.want[0] != 400 { // net/http reads on for a while behind what it refuses
					assert.Equal(t, c.closed, closed, "closed, std %v", std)
				}
				assert.Equal(t, c.interim, interim, "100 (Continue), std %v", std)
			}
			if c.want[0] == 400 {
				return // net/http refuses in words of its own
			}
			assert.Equal(t, got[1], got[0])
		})
	}
}

// What could be read in two ways is refused by our own front; net/http accepts some of it.
func TestWireRefuses(t *testing.T) {
	for name, raw := range map[string]string{
		"length and coding": "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"bare LF":           "GET /v1/models HTTP/1.1\nHost: h\n\n",
		"fold":              "GET /v1/models HTTP/1.1\r\nHost: h\r\nA: b\r\n c\r\n\r\n",
		"two hosts":         "GET /v1/models HTTP/1.1\r\nHost: h\r\nHost: g\r\n\r\n",
		"absolute":          "GET http://x/v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			addr, _ := twinFront(t, false)
			got, _, closed := talk(t, addr, raw+"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", "GET", "GET")
			require.Len(t, got, 1, "nothing behind it is answered")
			assert.Equal(t, 400, got[0].Status)
			assert.True(t, closed)
		})
	}
}

// A client that hangs up ends its request at the engine: before the head and in the stream, closed or reset.
func TestHangUpReachesTheEngine(t *testing.T) {
	for _, std := range []bool{false, true} {
		for _, do := range []string{"hang", "begin"} {
			for _, reset := range []bool{false, true} {
				t.Run(fmt.Sprintf("std %v %s reset %v", std, do, reset), func(t *testing.T) {
					addr, engine := twinFront(t, std)
					c, err := net.Dial("tcp", addr)
					require.NoError(t, err)
					body := `{"model":"m","stream":true,"messages":[]}`
					fmt.Fprintf(c, "POST %s?do=%s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, do, len(body), body)
					if do == "begin" {
						_, err = bufio.NewReader(c).ReadString('}')
						require.NoError(t, err)
					} else {
						time.Sleep(50 * time.Millisecond)
					}
					if reset {
						_ = c.(*net.TCPConn).SetLinger(0)
					}
					require.NoError(t, c.Close())
					select {
					case <-engine.gone:
					case <-time.After(5 * time.Second):
						t.Fatal("the engine still works for a client that is gone")
					}
				})
			}
		}
	}
}

// Budgets of our own front, kernel and network apart: what a request may allocate, and nothing for a streamed event.
func TestWireAllocations(t *testing.T) {
	if raceOn {
		t.Skip("pools forget at random under the race detector")
	}
	body := `{"id":"c","object":"chat.completion","model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}`
	reply := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	s, _ := onScript(t, func() ([]byte, error) { return reply, nil })
	req := chatRequest(2048, false)
	serveScript(s, req, 50)
	const n = 500
	perRequest := testing.AllocsPerRun(5, func() { serveScript(s, req, n) }) / n
	assert.Less(t, perRequest, 30.0, "allocations of a request")

	event := chunk("x")
	events := func(count int) float64 {
		i := 0
		s, _ := onScript(t, func() ([]byte, error) {
			i++
			switch {
			case i == 1:
				return []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"), nil
			case i <= count+1:
				return fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event)[:], nil
			}
			end := finishChunk + doneChunk
			i = 0
			return fmt.Appendf(nil, "%x\r\n%s\r\n0\r\n\r\n", len(end), end), nil
		})
		return testing.AllocsPerRun(3, func() { serveScript(s, chatRequest(64, true), 1) })
	}
	few, many := events(100), events(2100)
	// The script itself allocates for each event: its own boxes and bytes.
	script := testing.AllocsPerRun(100, func() { _ = fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event) })
	assert.Less(t, (many-few)/2000-script, 0.05, "allocations of a streamed event")
}
