package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/agent/engine/enginesim"
)

const modelName = "demo-8b"

// engines are simulated engines that listen on loopback.
type engines struct {
	urls   []string
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// startEngines starts one engine for each of params.
func startEngines(params []enginesim.Params) (*engines, error) {
	ctx, cancel := context.WithCancel(context.Background())
	e := &engines{cancel: cancel}
	for i, p := range params {
		s, err := enginesim.NewServer(enginesim.ServerConfig{Params: p, Dialect: "vllm", Model: modelName, Seed: 1})
		if err != nil {
			e.stop()
			return nil, err
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			e.stop()
			return nil, fmt.Errorf("engine %d: %w", i+1, err)
		}
		e.urls = append(e.urls, "http://"+l.Addr().String())
		e.wg.Go(func() { _ = s.Run(ctx) })      // returns nil
		e.wg.Go(func() { _ = s.Serve(ctx, l) }) // ends with ctx
	}
	return e, nil
}

func (e *engines) stop() {
	e.cancel()
	e.wg.Wait()
}

// fleet is one agent for each engine.
type fleet struct {
	agents []*agent.Agent
	cancel context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	err    error
}

// startFleet starts the agents and returns when all are ready and know each other.
func startFleet(ctx context.Context, urls []string, c Config) (*fleet, error) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f := &fleet{cancel: cancel}
	var join []string
	for i, url := range urls {
		cfg := agent.DefaultConfig()
		cfg.Listen, cfg.PeerListen, cfg.StatusListen, cfg.GossipListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
		cfg.NodeName, cfg.Cluster = fmt.Sprintf("replica-%d", i+1), "demo"
		cfg.EngineURL, cfg.Join = url, join
		cfg.DrainTimeout = 5 * time.Second
		if c.Policy != "" {
			cfg.Policy = c.Policy
		}
		a, err := agent.New(cfg, agent.Options{Logger: c.Logger, Seed: uint64(i + 1)})
		if err != nil {
			f.stop()
			return nil, err
		}
		f.wg.Go(func() {
			if err := a.Run(life); err != nil {
				f.fail(fmt.Errorf("%s: %w", cfg.NodeName, err))
			}
		})
		select {
		case <-a.Listening():
		case <-life.Done():
			f.stop()
			return nil, f.failure()
		case <-ctx.Done():
			f.stop()
			return nil, ctx.Err()
		}
		f.agents = append(f.agents, a)
		join = []string{f.agents[0].Addresses().Gossip}
	}
	if err := f.wait(ctx, 30*time.Second); err != nil {
		f.stop()
		return nil, err
	}
	return f, nil
}

func (f *fleet) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
	f.cancel()
}

func (f *fleet) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// wait returns when every agent is ready and has fresh records of all others.
func (f *fleet) wait(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		why := ""
		for _, a := range f.agents {
			if ok, w := a.Ready(); !ok {
				why = a.Node() + ": " + w
			} else if n := f.knows(a); n < len(f.agents) {
				why = fmt.Sprintf("%s knows %d of %d replicas", a.Node(), n, len(f.agents))
			}
		}
		if why == "" {
			return nil
		}
		if err := f.failure(); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("the fleet is not ready: " + why)
		}
	}
}

// knows counts the replicas that a sees ready with their model.
func (f *fleet) knows(a *agent.Agent) (n int) {
	for _, p := range a.Status().Peers {
		if p.State == "ready" && len(p.Models) > 0 {
			n++
		}
	}
	return n
}

func (f *fleet) stop() {
	f.cancel()
	f.wg.Wait()
}
