package operators

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/require"
)

var long = flag.Bool("long", false, "also run what takes long")

func TestMain(m *testing.M) { harness.Main(m) }

// longOnly skips what takes long.
func longOnly(t *testing.T) {
	t.Helper()
	if !*long {
		t.Skip("runs with -long")
	}
}

// fleet is some agents with simulated engines, in this process, on loopback.
type fleet struct {
	agents []*agent.Agent
}

// startFleet runs n agents until the test ends; speed is the engines', change what is special about agent i.
func startFleet(t *testing.T, n int, speed float64, change func(i int, c *agent.Config)) *fleet {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	f := &fleet{}
	for i := range n {
		p := enginesim.DefaultParams()
		p.Speed = speed
		s, err := enginesim.NewServer(enginesim.ServerConfig{Params: p, Dialect: "vllm", Model: "sim", Seed: uint64(i + 1)})
		require.NoError(t, err)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		wg.Go(func() { _ = s.Run(ctx) })      // ends with ctx
		wg.Go(func() { _ = s.Serve(ctx, l) }) // likewise
		c := agent.DefaultConfig()
		c.Listen, c.PeerListen, c.StatusListen, c.GossipListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
		c.NodeName, c.Cluster, c.EngineURL, c.DrainTimeout = fmt.Sprintf("replica-%d", i+1), "operators", "http://"+l.Addr().String(), 2*time.Second
		c.GPUDevices = "none"
		if i > 0 {
			c.Join = []string{f.agents[0].Addresses().Gossip}
		}
		if change != nil {
			change(i, &c)
		}
		a, err := agent.New(c, agent.Options{Logger: slog.New(slog.DiscardHandler), Seed: uint64(i + 1)})
		require.NoError(t, err)
		wg.Go(func() {
			if err := a.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		select {
		case <-a.Listening():
		case <-time.After(10 * time.Second):
			t.Fatal("an agent does not start")
		}
		f.agents = append(f.agents, a)
	}
	require.Eventually(t, func() bool {
		for _, a := range f.agents {
			ready := 0
			for _, p := range a.Status().Peers {
				if p.State == "ready" && len(p.Models) > 0 {
					ready++
				}
			}
			if ok, _ := a.Ready(); !ok || ready < n {
				return false
			}
		}
		return true
	}, 60*time.Second, 50*time.Millisecond, "the fleet does not get ready")
	return f
}

func (f *fleet) client(i int) string { return "http://" + f.agents[i].Addresses().Client }

// chat streams one chat and returns when its first content came.
func chat(ctx context.Context, hc *http.Client, base string, promptTokens, maxTokens, seed int) (first time.Duration, err error) {
	return chatModel(ctx, hc, base, "sim", promptTokens, maxTokens, seed)
}

func chatModel(ctx context.Context, hc *http.Client, base, model string, promptTokens, maxTokens, seed int) (first time.Duration, err error) {
	var prompt strings.Builder
	for n := 0; prompt.Len() < 4*promptTokens; n++ {
		fmt.Fprintf(&prompt, "w%d.%d ", seed, n)
	}
	body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":%q}]}`, model, maxTokens, prompt.String())
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", bytes.NewReader([]byte(body)))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := hc.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(res.Body)
		return 0, fmt.Errorf("status %d: %s", res.StatusCode, b)
	}
	done := false
	r := bufio.NewScanner(res.Body)
	for r.Scan() {
		line := r.Text()
		if first == 0 && strings.Contains(line, `"content":"`) && !strings.Contains(line, `"content":""`) {
			first = time.Since(start)
		}
		done = done || line == "data: [DONE]"
	}
	if r.Err() != nil {
		return 0, r.Err()
	}
	if !done || first == 0 {
		return 0, errors.New("the stream ended without its end")
	}
	return first, nil
}

// mean of durations.
func mean(d []time.Duration) time.Duration {
	var sum time.Duration
	for _, x := range d {
		sum += x
	}
	return sum / time.Duration(max(1, len(d)))
}

// quantile of durations, 0..1.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}
