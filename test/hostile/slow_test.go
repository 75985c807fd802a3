package hostile

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
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

// 50 bodies of 20 MB (with -long, else of 4 MB) at once stay within the memory budget of bodies.
func TestBodiesWithinBudget(t *testing.T) {
	size, count, budget := 4<<20, 20, int64(16<<20)
	if *long {
		size, count, budget = 20<<20, 50, 256<<20
	}
	b := newBackend(t)
	r := startProxy(t, b.addr, func(c *proxy.Config) { c.KeepBodies = budget })
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", size) + `"}]}`
	var most int64
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				most = max(most, r.proxy.Metrics().BodyBytes)
			}
		}
	})
	codes := make([]int, count)
	var wg sync.WaitGroup
	hc := &http.Client{Timeout: 2 * time.Minute}
	for i := range count {
		wg.Go(func() {
			resp, err := hc.Post("http://"+r.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err == nil {
				codes[i] = resp.StatusCode
				_ = resp.Body.Close()
			}
		})
	}
	wg.Wait()
	close(stop)
	watch.Wait()
	for _, c := range codes {
		assert.Contains(t, []int{200, 503}, c)
	}
	assert.Contains(t, codes, 200)
	assert.LessOrEqual(t, most, budget+int64(count)*128<<10) // 64 KiB of each body are always kept
	assert.NotZero(t, most)
	require.Eventually(t, func() bool { return r.proxy.Metrics().BodyBytes == 0 }, 10*time.Second, 10*time.Millisecond, "all is given back")
	t.Logf("%d bodies of %d MiB: at most %d of %d MiB kept, answers %v", count, size>>20, most>>20, budget>>20, codes)
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
