package soak

import (
	"bytes"
	"context"
	"encoding/base64"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

var (
	long   = flag.Bool("long", false, "run for ten minutes")
	length = flag.Duration("for", 0, "how long to run")
)

const (
	agents  = 3
	workers = 24
	round   = 8 * time.Second // of traffic; at least four of them
)

// member is an agent with its engine.
type member struct {
	*agent.Agent
	sim    *enginesim.Server
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func (m *member) end() {
	m.cancel()
	m.wg.Wait()
}

// start runs a member until end.
func start(t *testing.T, name string, join []string) *member {
	t.Helper()
	p := enginesim.DefaultParams()
	p.Speed = 50
	m := &member{}
	var err error
	m.sim, err = enginesim.NewServer(enginesim.ServerConfig{Params: p, Model: "sim", Seed: 1})
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	cfg := agent.DefaultConfig()
	cfg.Listen, cfg.PeerListen, cfg.StatusListen, cfg.GossipListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	cfg.EngineURL, cfg.Cluster, cfg.NodeName, cfg.Join, cfg.DrainTimeout = "http://"+ln.Addr().String(), "soak", name, join, 2*time.Second
	cfg.GossipKey = base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32))
	m.Agent, err = agent.New(cfg, agent.Options{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	engine, stopEngine := context.WithCancel(context.Background())
	ctx, cancel := context.WithCancel(context.Background())
	var engines sync.WaitGroup
	engines.Go(func() { _ = m.sim.Run(engine) })
	engines.Go(func() { _ = m.sim.Serve(engine, ln) })
	m.wg.Go(func() {
		assert.NoError(t, m.Run(ctx))
		stopEngine()
		engines.Wait()
	})
	m.cancel = cancel
	<-m.Listening()
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if ok, why := m.Ready(); ok {
			return m
		} else if time.Now().After(until) {
			require.FailNow(t, "not ready", why)
		}
	}
}

// sample is what the process holds while nobody asks for anything.
type sample struct {
	goroutines, descriptors int
	heap, rss               int64
}

func take(t *testing.T) sample {
	t.Helper()
	runtime.GC()
	runtime.GC() // the second empties the pools
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s := sample{goroutines: runtime.NumGoroutine(), heap: int64(m.HeapAlloc)}
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		s.descriptors = len(fds)
	}
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		pages, _ := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
		s.rss = pages * int64(os.Getpagesize())
	}
	return s
}

// visit does one thing that clients do: a chat, a stream, one that is left early, one that is read slowly, a large one, an
// unknown model, a body that breaks off.
func visit(hc *http.Client, addr string, rnd *rand.Rand) (kind string, status int) {
	url := "http://" + addr + "/v1/chat/completions"
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ask := func(model string, stream bool, tokens int, prompt string) (*http.Response, error) {
		body := fmt.Sprintf(`{"model":%q,"stream":%v,"max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":%q}]}`, model, stream, tokens, prompt)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", "application/json")
		return hc.Do(req)
	}
	prompt := fmt.Sprintf("conversation %d, turn %d", rnd.IntN(500), rnd.IntN(20))
	var resp *http.Response
	var err error
	switch n := rnd.IntN(20); {
	case n < 8:
		kind = "chat"
		resp, err = ask("sim", false, 10, prompt)
	case n < 14:
		kind = "stream"
		resp, err = ask("sim", true, 30, prompt)
	case n < 16:
		kind = "left early"
		if resp, err = ask("sim", true, 300, prompt); err == nil {
			_, _ = resp.Body.Read(make([]byte, 10))
			cancel()
		}
	case n < 17:
		kind = "slow reader"
		if resp, err = ask("sim", true, 30, prompt); err == nil {
			for i := 0; i < 5; i++ {
				_, _ = resp.Body.Read(make([]byte, 100))
				time.Sleep(20 * time.Millisecond)
			}
		}
	case n < 18:
		kind = "large"
		resp, err = ask("sim", false, 2, strings.Repeat(prompt+" ", 1000))
	case n < 19:
		kind = "unknown model"
		resp, err = ask("nobody-has-it", false, 2, prompt)
	default:
		kind = "broken off"
		if c, e := net.Dial("tcp", addr); e == nil {
			_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{\"model\":")
			_ = c.Close()
		}
		return kind, 0
	}
	if err != nil {
		return kind, 0
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return kind, resp.StatusCode
}

// A fleet under traffic, with engines that fail and an agent that is replaced each round, holds as much at the end as at the
// beginning.
func TestSoak(t *testing.T) {
	if *long && *length == 0 {
		*length = 10 * time.Minute
	}
	if *length == 0 {
		t.Skip("runs with -long or -for")
	}
	var fleet []*member
	var join []string
	for i := range agents {
		m := start(t, fmt.Sprintf("a%d", i), join)
		fleet, join = append(fleet, m), append(join, m.Addresses().Gossip)
	}
	var mu sync.Mutex
	counts := map[string]int{}
	var asked, failed, refused atomic.Int64
	var samples []sample
	began := time.Now()
	for n := 0; time.Since(began) < *length || n < 4; n++ {
		var addrs []string
		for _, m := range fleet {
			addrs = append(addrs, m.Addresses().Client)
		}
		kinds := []string{"reset", "error500", "busy", "cut", "slow", "silence"}
		require.NoError(t, fleet[n%agents].sim.Inject(enginesim.Fault{Kind: kinds[n%len(kinds)], Count: 20, Factor: 4, For: round / 2}))
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(n), uint64(w)))
				tr := &http.Transport{MaxIdleConnsPerHost: 4}
				if w%4 == 0 { // over HTTP/2
					var ps http.Protocols
					ps.SetUnencryptedHTTP2(true)
					tr.Protocols = &ps
				}
				defer tr.CloseIdleConnections()
				hc := &http.Client{Transport: tr, Timeout: 30 * time.Second}
				for {
					select {
					case <-stop:
						return
					default:
					}
					kind, status := visit(hc, addrs[rnd.IntN(len(addrs))], rnd)
					asked.Add(1)
					switch {
					case status == http.StatusTooManyRequests: // the fleet is full, and says so
						refused.Add(1)
					case (kind == "chat" || kind == "stream") && status != 200:
						failed.Add(1)
					}
					mu.Lock()
					counts[fmt.Sprint(kind, " ", status)]++
					mu.Unlock()
				}
			})
		}
		time.Sleep(round)
		close(stop)
		wg.Wait()
		for _, m := range fleet {
			m.sim.Clear("")
		}
		// One agent goes and another one comes; the last two are its seeds.
		old := fleet[0]
		fleet = fleet[1:]
		old.end()
		fleet = append(fleet, start(t, fmt.Sprintf("a%d", agents+n), []string{fleet[0].Addresses().Gossip, fleet[1].Addresses().Gossip}))
		idle(t, fleet)
		s := take(t)
		samples = append(samples, s)
		t.Logf("%5.0f s: %7d requests, %4d goroutines, %3d descriptors, heap %5d KiB, resident %d MiB", time.Since(began).Seconds(), asked.Load(), s.goroutines, s.descriptors, s.heap>>10, s.rss>>20)
	}
	for _, m := range fleet {
		m.end()
	}
	var lines []string
	for k, n := range counts {
		lines = append(lines, fmt.Sprintf("%s: %d", k, n))
	}
	slices.Sort(lines)
	t.Logf("%d requests, %d refused, %d chats or streams failed: %s", asked.Load(), refused.Load(), failed.Load(), strings.Join(lines, ", "))
	assert.Less(t, float64(failed.Load()), 0.02*float64(asked.Load()))

	assert.Less(t, float64(refused.Load()), 0.3*float64(asked.Load()), "a soak of refusals shows nothing")
	// The first round warms pools, caches and windows; what is learned (digests, lengths) has a bound of its own.
	first, last := samples[1], samples[len(samples)-1]
	assert.LessOrEqual(t, last.goroutines, first.goroutines+first.goroutines/5+10, "goroutines")
	// Kept connections come and go with the agents: by halves, where a leak would be of thousands.
	assert.LessOrEqual(t, last.descriptors, first.descriptors+first.descriptors/2+16, "descriptors")
	assert.LessOrEqual(t, last.heap, first.heap+first.heap/4+(4<<20), "heap")
	assert.LessOrEqual(t, last.rss, first.rss+first.rss/3+(16<<20), "resident memory")
}

// idle waits until nothing is under way and connections that are kept for a while have gone.
func idle(t *testing.T, fleet []*member) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		busy := 0
		for _, m := range fleet {
			s := m.Status()
			busy += s.Load.Running + s.Queue.Held
		}
		if busy == 0 {
			break
		}
		require.True(t, time.Now().Before(until), "%d requests never end", busy)
	}
	http.DefaultClient.CloseIdleConnections()
	time.Sleep(4500 * time.Millisecond) // engines' connections are kept for 4 s
}
