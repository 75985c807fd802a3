package hostile

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// p99Of sends n small requests one after the other, each on a connection that is kept, and returns the 99th percentile.
func p99Of(t *testing.T, addr string, n int) time.Duration {
	t.Helper()
	return p99With(t, addr, n, 0)
}

// p99With does so with a pause behind each.
func p99With(t *testing.T, addr string, n int, pause time.Duration) time.Duration {
	t.Helper()
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	hc := &http.Client{Transport: tr, Timeout: 30 * time.Second}
	took := make([]time.Duration, 0, n)
	for range n {
		begin := time.Now()
		resp, err := hc.Post("http://"+addr+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m"}`))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		require.Equal(t, 200, resp.StatusCode)
		took = append(took, time.Since(begin))
		if pause > 0 {
			time.Sleep(pause)
		}
	}
	slices.Sort(took)
	return took[n*99/100]
}

// jitter is what a busy machine alone may cost at the 99th percentile. With -long the machine is to be quiet.
func jitter() time.Duration {
	if *long {
		return 20 * time.Millisecond
	}
	return 150 * time.Millisecond
}

// Slow clients (2,000 with -long, else 300) that drip their heads, and readers that read nothing, do not slow a good client,
// and at the limit of connections good ones still come in.
func TestSlowClients(t *testing.T) {
	n := 300
	if *long {
		n = 2000
	}
	b := newBackend(t)
	r := startProxy(t, b.addr, func(c *proxy.Config) { c.MaxConns = n })
	p99Of(t, r.addr, 50)
	calm := p99Of(t, r.addr, 300)
	before := memory()
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range n {
		c, err := net.Dial("tcp", r.addr)
		require.NoError(t, err)
		wg.Go(func() {
			defer c.Close()
			head := "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-A: " + strings.Repeat("a", 2000)
			for j := range len(head) {
				if _, err := io.WriteString(c, head[j:j+1]); err != nil {
					return
				}
				select {
				case <-stop:
					return
				case <-time.After(time.Second + time.Duration(i)*time.Millisecond/4):
				}
			}
		})
	}
	time.Sleep(1500 * time.Millisecond)
	under := p99Of(t, r.addr, 300)
	grown := memory() - before
	close(stop)
	wg.Wait()
	t.Logf("%d slow clients: p99 %v calm, %v under them; heap grown by %d KiB", n, calm, under, grown>>10)
	assert.Less(t, under, max(2*calm, jitter()), "calm p99 %v", calm)
	assert.Less(t, grown, int64(n)*40<<10, "bytes for each slow client")
	assert.NotZero(t, r.proxy.Metrics().Refusals["max_connections"], "the limit was reached")
}

// 50 bodies of 20 MB (with -long, else 20 of 4 MB), all at once as fast as they come and then at 100 MB/s (40), stay within
// the memory budget of bodies; the second time they do not keep a good client waiting.
func TestBodiesWithinBudget(t *testing.T) {
	size, count, budget, pieces := 4<<20, 20, int64(16<<20), 20
	if *long {
		size, count, budget, pieces = 20<<20, 50, 256<<20, 100
	}
	b := newBackend(t)
	r := startProxy(t, b.addr, func(c *proxy.Config) { c.KeepBodies = budget })
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", size) + `"}]}`)
	p99Of(t, r.addr, 50)
	const pause = 2 * time.Millisecond
	calm := p99With(t, r.addr, 300, pause)
	var most, heap int64
	stop := make(chan struct{})
	var watch sync.WaitGroup
	objects := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	watch.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				most = max(most, r.proxy.Metrics().BodyBytes)
				metrics.Read(objects)
				heap = max(heap, int64(objects[0].Value.Uint64()))
			}
		}
	})
	// bodies sends all of them at once, each in pieces with a pause behind each, and returns the answers' codes.
	bodies := func(piece int, pause time.Duration) []int {
		codes := make([]int, count)
		var wg sync.WaitGroup
		for i := range count {
			wg.Go(func() {
				nc, err := net.Dial("tcp", r.addr)
				if err != nil {
					return
				}
				defer nc.Close()
				time.Sleep(pause * time.Duration(i) / time.Duration(count)) // not all in step
				_, _ = fmt.Fprintf(nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", len(body))
				for rest := body; len(rest) > 0; time.Sleep(pause) {
					n := min(piece, len(rest))
					if _, err := nc.Write(rest[:n]); err != nil {
						break // refused early; the answer stands there
					}
					rest = rest[n:]
				}
				if resp, err := http.ReadResponse(bufio.NewReader(nc), nil); err == nil {
					codes[i] = resp.StatusCode
					_ = resp.Body.Close()
				}
			})
		}
		wg.Wait()
		return codes
	}
	codes := bodies(len(body), 0)
	var under time.Duration
	watch.Go(func() { under = p99With(t, r.addr, pieces*35, pause) }) // three quarters of their time
	codes = append(codes, bodies(len(body)/pieces, 100*time.Millisecond)...)
	close(stop)
	watch.Wait()
	for _, c := range codes {
		assert.Contains(t, []int{200, 503}, c)
	}
	assert.Contains(t, codes, 200)
	assert.Less(t, most, budget)
	assert.NotZero(t, most)
	require.Eventually(t, func() bool { return r.proxy.Metrics().BodyBytes == 0 }, 10*time.Second, 10*time.Millisecond, "all is given back")
	slices.Sort(codes)
	t.Logf("%d bodies of %d MiB: at most %.1f of %d MiB kept, this process's heap at most %d MiB (the clients and one body of theirs in it); p99 of a good client %v calm, %v under them; answers %v",
		count, size>>20, float64(most)/(1<<20), budget>>20, heap>>20, calm, under, slices.Compact(codes))
	assert.Less(t, under, max(2*calm, jitter()), "calm p99 %v", calm)
}

// memory is the live heap after a collection.
func memory() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// C104: random paths, models, user agents and methods make no new names anywhere: all counters have a bounded set.
func TestC104NoEndlessLabels(t *testing.T) {
	r := startProxy(t, newBackend(t).addr, func(*proxy.Config) {})
	hc := &http.Client{Timeout: 30 * time.Second}
	count := func() int {
		m := r.proxy.Metrics()
		return len(m.EntryByOutcome) + len(m.TargetByOutcome) + len(m.Retries) + len(m.Refusals) + len(m.Continues)
	}
	before := count()
	for i := range 500 {
		req, _ := http.NewRequest("M"+fmt.Sprint(i), fmt.Sprintf("http://%s/v1/%d?x=%d", r.addr, i, i), strings.NewReader(fmt.Sprintf(`{"model":"random-%d"}`, i)))
		req.Header.Set("User-Agent", fmt.Sprint(i))
		resp, err := hc.Do(req)
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
	assert.Equal(t, before, count())
}

// C17 and C18: both lengths, and a length that is nonsense, are refused with 400 and the connection ends; what was hidden
// behind them is never seen by the engine.
func TestC17C18BothLengths(t *testing.T) {
	b := newBackend(t)
	addr := startGrapevine(t, b)
	for _, name := range []string{"cl-and-te.txt", "bad-cl-with-te.txt"} {
		msg, err := os.ReadFile("testdata/cases/" + name)
		require.NoError(t, err)
		o := send(front{"grapevine", addr, b}, oddRequest{name: name, bytes: msg, requests: 2})
		assert.Equal(t, 400, o.status, name)
		assert.True(t, o.closed, name)
		assert.Zero(t, o.read, name)
	}
}

// Readers that read nothing of a long answer (1,000 with -long, else 150) do not slow a good client, and cost bounded memory.
func TestStalledReaders(t *testing.T) {
	n := 150
	if *long {
		n = 1000
	}
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path != "/v1/endless" {
			_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		piece := []byte("data: " + strings.Repeat("x", 16<<10) + "\n\n")
		for r.Context().Err() == nil {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}))
	r := startProxy(t, strings.TrimPrefix(engine.URL, "http://"), func(*proxy.Config) {})
	p99Of(t, r.addr, 50)
	calm := p99Of(t, r.addr, 300)
	before := memory()
	conns := make([]net.Conn, 0, n)
	for range n {
		c, err := net.Dial("tcp", r.addr)
		require.NoError(t, err)
		_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
		conns = append(conns, c)
		_, err = io.WriteString(c, "POST /v1/endless HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{\"model\":\"m\"}")
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return r.proxy.Inflight() == n }, 30*time.Second, 20*time.Millisecond)
	time.Sleep(time.Second) // until all are stuck
	under := p99Of(t, r.addr, 300)
	grown := memory() - before
	for _, c := range conns {
		_ = c.Close()
	}
	assert.Eventually(t, func() bool { return r.proxy.Inflight() == 0 }, 30*time.Second, 20*time.Millisecond, "their hang-up ends all")
	engine.Close()
	t.Logf("%d stalled readers: p99 %v calm, %v under them; heap grown by %d KiB, the engine's side in it", n, calm, under, grown>>10)
	assert.Less(t, under, max(2*calm, jitter()), "calm p99 %v", calm)
	assert.Less(t, grown, int64(n)*256<<10)
}

// C49: a member that lies about its load, idle for ever and faster than any, and answers with errors, gets no more than the few
// requests that show what it is.
func TestLiarGetsLittle(t *testing.T) {
	var lied atomic.Int32
	liar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			lied.Add(1)
		}
		w.WriteHeader(http.StatusInternalServerError)
	}))
	defer liar.Close()
	b := newBackend(t)
	r := startProxy(t, b.addr, func(c *proxy.Config) {
		policy, err := routing.NewPolicy("auto")
		require.NoError(t, err)
		c.Policy = policy
		now := time.Now()
		c.Table.SetMember(routing.Member{Boot: 66, Node: "liar", Addr: strings.TrimPrefix(liar.URL, "http://"), Version: 1}, now)
		c.Table.SetModels(66, []routing.Model{{ID: "m"}}, 0, now)
		// Ourselves honest and busy, so that the lie tempts.
		c.Table.Update(routing.Report{Boot: 1, Seq: 2, State: routing.StateReady, Running: routing.Some(8), Waiting: routing.Some(4), PendingTokens: routing.Some(50_000),
			PrefillRate: routing.Some(5000.)}, now)
	})
	table := r.table
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // it repeats its lie 10 times a second
		for seq := uint32(1); ; seq++ {
			table.Update(routing.Report{Boot: 66, Seq: seq, State: routing.StateReady, Running: routing.Some(0), Waiting: routing.Some(0), PendingTokens: routing.Some(0),
				PrefillRate: routing.Some(1e9), Weight: routing.Some(255.)}, time.Now())
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	hc := &http.Client{Timeout: 30 * time.Second}
	bad := 0
	for range 300 {
		resp, err := hc.Post("http://"+r.addr+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"x"}]}`))
		require.NoError(t, err)
		if _ = resp.Body.Close(); resp.StatusCode != 200 {
			bad++
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("the liar got %d of 300 requests, %d failed", lied.Load(), bad)
	assert.NotZero(t, lied.Load(), "it was believed at first")
	assert.LessOrEqual(t, lied.Load(), int32(15))
	assert.LessOrEqual(t, bad, 15)
}

// A client that hangs up while its body waits for memory is seen at once, if what it sent fits into the sockets' buffers; its
// end stands behind what does not, and is seen when that is read, or when the wait is over.
func TestHangUpWhileABodyWaits(t *testing.T) {
	r := startProxy(t, newBackend(t).addr, func(c *proxy.Config) { c.KeepBodies, c.QueueTimeout = 1<<20, time.Minute })
	begin := func(n int) net.Conn { // n bytes of a body that does not name its model for long
		c, err := net.Dial("tcp", r.addr)
		require.NoError(t, err)
		_, err = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4000000\r\n\r\n{\"messages\":[{\"role\":\"user\",\"content\":\""+strings.Repeat("x", n))
		require.NoError(t, err)
		return c
	}
	first := begin(2 << 20) // the one that may pass the limit, and never goes on
	defer first.Close()
	require.Eventually(t, func() bool { return r.proxy.Metrics().BodyBytes > 1<<20 }, 10*time.Second, 10*time.Millisecond)
	second := begin(80 << 10)
	require.Eventually(t, func() bool { return r.proxy.Inflight() == 2 }, 10*time.Second, 10*time.Millisecond)
	time.Sleep(300 * time.Millisecond) // until it waits
	hung := time.Now()
	_ = second.Close()
	require.Eventually(t, func() bool { return r.proxy.Inflight() == 1 }, 10*time.Second, 10*time.Millisecond)
	t.Logf("seen after %v", time.Since(hung))
}
