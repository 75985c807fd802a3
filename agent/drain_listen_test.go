package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/gossip/gossiptest"
)

// pipes is a network in memory, so that an agent can run in fake time.
type pipes struct {
	mu    sync.Mutex
	ports map[string]*pipeListener
}

type pipeListener struct {
	n     *pipes
	addr  string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (n *pipes) listen(_ context.Context, _, addr string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &pipeListener{n: n, addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
	if n.ports == nil {
		n.ports = map[string]*pipeListener{}
	}
	n.ports[addr] = l
	return l, nil
}

func (n *pipes) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.ports[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, errors.New("connection refused")
	}
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-l.done:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		delete(l.n.ports, l.addr)
	})
	return nil
}

func (l *pipeListener) Addr() net.Addr {
	a, err := net.ResolveTCPAddr("tcp", l.addr)
	if err != nil {
		return &net.TCPAddr{}
	}
	return a
}

// A draining agent takes new clients for ten seconds and none afterwards, while what is under way goes on to its end; with a
// shorter drain timeout it takes them that long.
func TestDrainListensForTenSeconds(t *testing.T) {
	for timeout, limit := range map[time.Duration]time.Duration{time.Minute: listenOn, 4 * time.Second: 4 * time.Second} {
		t.Run(timeout.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { drainListens(t, timeout, limit) })
		})
	}
}

func drainListens(t *testing.T, timeout, limit time.Duration) {
	network := &pipes{}
	sim, err := enginesim.NewServer(enginesim.ServerConfig{Params: enginesim.Rates(100_000, 50*time.Millisecond, 8), Model: "sim", Seed: 1, Listen: network.listen})
	require.NoError(t, err)
	ctx, end := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = sim.Run(ctx) })
	wg.Go(func() { _ = sim.ListenAndServe(ctx, "tcp", "127.0.0.1:8000", nil) })

	cfg := loopbackConfig("http://127.0.0.1:8000")
	cfg.Listen, cfg.PeerListen, cfg.StatusListen, cfg.DrainTimeout = "127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:8082", timeout
	a, err := New(cfg, Options{Listen: network.listen, Dial: network.dial, Transport: gossiptest.New(1).ListenAt("127.0.0.1:7946"), Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	run, term := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	wg.Go(func() { ended <- a.Run(run) })
	for range 100 {
		if ok, _ := a.Ready(); ok {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}

	client := &http.Client{Transport: &http.Transport{DialContext: network.dial, DisableKeepAlives: true}}
	post := func(tokens int) (*http.Response, error) {
		return client.Post("http://127.0.0.1:8080/v1/chat/completions", "application/json",
			strings.NewReader(fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, tokens)))
	}
	long, err := post(500) // 25 s
	require.NoError(t, err)
	require.Equal(t, 200, long.StatusCode)
	read := make(chan string, 1)
	wg.Go(func() {
		b, _ := io.ReadAll(bufio.NewReader(long.Body))
		long.Body.Close()
		read <- string(b)
	})
	time.Sleep(time.Second)
	term()
	began := time.Now()
	var last time.Duration
	refused := false
	for time.Since(began) < 15*time.Second {
		at := time.Since(began)
		resp, err := post(2)
		if err != nil {
			refused = true
		} else {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			assert.False(t, refused, "served again after %v", at)
			assert.Equal(t, 200, resp.StatusCode, "after %v: the last replica serves", at)
			last = at
		}
		time.Sleep(250*time.Millisecond - time.Since(began)%(250*time.Millisecond))
	}
	assert.InDelta(t, limit.Seconds(), last.Seconds(), 0.5, "the last client that was served")
	assert.NoError(t, <-ended)
	text := <-read
	if timeout > 25*time.Second {
		assert.Contains(t, text, "data: [DONE]", "what was under way")
	} else {
		assert.NotContains(t, text, "data: [DONE]")
	}
	end()
	wg.Wait()
	client.CloseIdleConnections()
	time.Sleep(2 * time.Minute) // memberlist's goroutines end by timers
}
