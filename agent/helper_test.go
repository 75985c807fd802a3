package agent

import (
	"bytes"
	"context"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/stretchr/testify/require"
)

// lockedBuffer is a log that a test can read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// runner is an agent that runs in a test.
type runner struct {
	*Agent
	t      *testing.T
	log    *lockedBuffer
	cancel context.CancelFunc
	done   chan error
}

// loopbackConfig is the configuration of an agent whose listeners take free ports of loopback.
func loopbackConfig(engine string) Config {
	c := DefaultConfig()
	c.Listen, c.PeerListen, c.StatusListen, c.GossipListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	c.EngineURL, c.NodeName, c.Cluster = engine, "test", "test"
	c.DrainTimeout = 5 * time.Second
	return c
}

// start runs an agent until the test ends.
func start(t *testing.T, cfg Config, opts Options) *runner {
	t.Helper()
	r := &runner{t: t, log: &lockedBuffer{}, done: make(chan error, 1)}
	opts.Logger = slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	a, err := New(cfg, opts)
	require.NoError(t, err)
	r.Agent = a
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.done <- a.Run(ctx) }()
	t.Cleanup(func() { r.stop() })
	select {
	case <-a.Listening():
	case err := <-r.done:
		r.done <- err
		require.NoError(t, err, "the agent ended at once")
	}
	return r
}

// stop ends the agent and returns what Run returned.
func (r *runner) stop() error {
	r.cancel()
	select {
	case err := <-r.done:
		r.done <- err
		return err
	case <-time.After(30 * time.Second):
		r.t.Error("the agent does not end:\n" + r.log.String())
		return context.DeadlineExceeded
	}
}

func (r *runner) get(path string) (int, string) {
	res, err := http.Get("http://" + r.Addresses().Status + path)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(b)
}

const chatBody = `{"model":"sim","messages":[{"role":"user","content":"hello there"}],"max_tokens":4,"ignore_eos":true}`

// chat sends one chat that is not streamed, on a connection of its own.
func (r *runner) chat(body string) (int, string) {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	res, err := c.Post("http://"+r.Addresses().Client+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error()
	}
	return res.StatusCode, string(b)
}

// eventually waits for a condition. Failing, it shows the log.
func (r *runner) eventually(within time.Duration, what string, cond func() bool) {
	r.t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		if cond() {
			return
		}
		if time.Now().After(end) {
			code, body := r.get("/readyz")
			require.FailNow(r.t, "no "+what, "within %s; /readyz %d %s\n%s", within, code, body, r.log.String())
		}
	}
}

func (r *runner) untilReady() {
	r.t.Helper()
	r.eventually(10*time.Second, "readiness", func() bool { ok, _ := r.Ready(); return ok })
}

// simEngine is a simulated engine on loopback that can be stopped and started again at its address.
type simEngine struct {
	t      *testing.T
	addr   string
	cfg    enginesim.ServerConfig
	cancel context.CancelFunc
	wg     sync.WaitGroup
	server *enginesim.Server
}

// fast is an engine for tests: tokens in fractions of a millisecond.
func fast() enginesim.ServerConfig {
	p := enginesim.DefaultParams()
	p.Speed = 50
	return enginesim.ServerConfig{Params: p, Model: "sim", Seed: 1}
}

func startSim(t *testing.T, cfg enginesim.ServerConfig) *simEngine {
	t.Helper()
	e := &simEngine{t: t, addr: "127.0.0.1:0", cfg: cfg}
	e.start()
	t.Cleanup(e.stop)
	return e
}

func (e *simEngine) url() string { return "http://" + e.addr }

func (e *simEngine) start() {
	e.t.Helper()
	l, err := net.Listen("tcp", e.addr)
	require.NoError(e.t, err)
	e.addr = l.Addr().String()
	e.server, err = enginesim.NewServer(e.cfg)
	require.NoError(e.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	s := e.server
	e.wg.Go(func() { _ = s.Run(ctx) })
	e.wg.Go(func() { _ = s.Serve(ctx, l) })
}

func (e *simEngine) stop() {
	e.cancel()
	e.wg.Wait()
}

// refusedURL is an address at which nothing listens.
func refusedURL(t *testing.T) string {
	s := httptest.NewServer(http.NotFoundHandler())
	s.Close()
	return s.URL
}

// Most tests here wait for the timers of agents, not for the processor: a few more of them at once than there are cores
// cost nothing.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set(strconv.Itoa(3 * runtime.GOMAXPROCS(0))) // a number, so it is taken
	}
	os.Exit(m.Run())
}
