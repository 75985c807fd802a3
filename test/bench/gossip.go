//go:build linux

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/routing"
)

// member is one agent's gossip and what it heard.
type member struct {
	*gossip.Node
	boot uint64
	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	heardAt map[uint64]time.Time
}

// gossipTargets are what gossip may cost with 100 agents, a key and the rate by the formula.
var gossipTargets = []struct {
	what  string
	limit float64
	of    func(gossipRow) float64
}{
	{"age p50 ms", 220, func(r gossipRow) float64 { return r.p50 }},
	{"CPU % of a core", 1, func(r gossipRow) float64 { return r.cpu }},
	{"records KiB/s", 32, func(r gossipRow) float64 { return r.recordKiB }},
	{"all KiB/s", 40, func(r gossipRow) float64 { return r.kib }},
	{"packets/s", 410, func(r gossipRow) float64 { return r.packets }},
}

// gossipBench measures what load records cost over real sockets: N real gossip nodes in one process on loopback, driven as
// fast as the publishing rule lets them. All share the process and its cores, so CPU an agent is process CPU ÷ N, and with
// many agents on few cores the tails measure the queueing there. Bytes are UDP payload plus 28 bytes of headers a packet.
func gossipBench(args []string) error {
	f := flag.NewFlagSet("gossip", flag.ExitOnError)
	n := f.Int("n", 0, "agents; 0: 3, 10, 30 and 100")
	long := f.Bool("long", false, "also 300 agents, in the profile large")
	key := f.Bool("key", true, "encrypt")
	secs := f.Int("seconds", 6, "length of the measured window")
	idle := f.Bool("idle", false, "do not change the load: heartbeats only")
	if err := f.Parse(args); err != nil {
		return err
	}
	sizes := []int{3, 10, 30, 100}
	if *n > 0 {
		sizes = []int{*n}
	}
	if *long {
		sizes = append(sizes, 300)
	}
	fmt.Println("|   N | records/s | age p50 ms | age p99 ms | CPU % of a core | packets/s | KiB/s | records KiB/s | heap KiB | failed |")
	fmt.Println("|----:|----------:|-----------:|-----------:|----------------:|----------:|------:|--------------:|---------:|-------:|")
	var hundred *gossipRow
	for _, n := range sizes {
		r, err := measureGossip(n, *key, *idle, time.Duration(*secs)*time.Second)
		if err != nil {
			return err
		}
		r.print(os.Stdout)
		if n == 100 && *key && !*idle {
			hundred = &r
		}
	}
	if hundred != nil {
		fmt.Println("\nat 100 with a key, beside what it may cost:")
		for _, t := range gossipTargets {
			v, word := t.of(*hundred), "ok"
			if v > t.limit {
				word = "ABOVE"
			}
			fmt.Printf("  %-16s %6.2f  ≤ %3.0f  %s\n", t.what, v, t.limit, word)
		}
	}
	return nil
}

// gossipRow is a row of the table; all but the ages are for one agent and second.
type gossipRow struct {
	n                                               int
	records, p50, p99, cpu, packets, kib, recordKiB float64
	heap                                            uint64
	failed                                          int
}

func (r gossipRow) print(w io.Writer) {
	fmt.Fprintf(w, "| %3d | %9.2f | %10.0f | %10.0f | %15.2f | %9.0f | %5.1f | %13.1f | %8d | %6d |\n",
		r.n, r.records, r.p50, r.p99, r.cpu, r.packets, r.kib, r.recordKiB, r.heap, r.failed)
}

// startMember makes a node on loopback.
func startMember(i int, profile string, join []string, key bool, failed *counter) (*member, error) {
	x := &member{boot: uint64(i+1)<<32 | 1, done: make(chan struct{}), heardAt: make(map[uint64]time.Time)}
	cfg := gossip.Config{
		NodeName: fmt.Sprintf("n%d", i), Member: routing.Member{Boot: x.boot, Addr: fmt.Sprintf("127.0.0.1:%d", 1000+i)}, Listen: "127.0.0.1:0", Join: join, Profile: profile,
		Logger: slog.New(slog.DiscardHandler),
		OnMember: func(_ routing.Member, e gossip.MemberEvent) {
			if e == gossip.MemberFailed {
				failed.add()
			}
		},
		OnReport: func(r routing.Report) {
			x.mu.Lock()
			x.heardAt[r.Boot] = time.Now()
			x.mu.Unlock()
		},
	}
	if key {
		cfg.Keys = [][]byte{slices.Repeat([]byte{7}, 32)}
	}
	var err error
	if x.Node, err = gossip.New(cfg); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	x.stop = cancel
	go func() {
		defer close(x.done)
		_ = x.Run(ctx) // ends by Close
	}()
	x.Offer(loadOf(0))
	x.ctx = ctx
	return x, nil
}

// drive changes the load all the time.
func (x *member) drive(ctx context.Context) {
	for turn := 0; ; turn++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(40+rand.IntN(20)) * time.Millisecond):
			x.Offer(loadOf(turn % 2 * 100_000))
		}
	}
}

func loadOf(pending int) routing.Report {
	return routing.Report{State: routing.StateReady, Running: routing.Some(4), Waiting: routing.Some(0), PendingTokens: routing.Some(pending), PrefillRate: routing.Some(8000.0)}
}

type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) add() { c.mu.Lock(); c.n++; c.mu.Unlock() }
func (c *counter) get() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func measureGossip(n int, key, idle bool, window time.Duration) (gossipRow, error) {
	profile := "auto"
	if n > 200 {
		profile = "large"
	}
	var nodes []*member
	var seeds []string
	var failed counter
	defer func() {
		var wg sync.WaitGroup
		for _, x := range nodes {
			wg.Go(func() { x.Close(); x.stop(); <-x.done })
		}
		wg.Wait()
	}()
	for i := range n {
		x, err := startMember(i, profile, seeds, key, &failed)
		if err != nil {
			return gossipRow{}, err
		}
		nodes = append(nodes, x)
		if len(seeds) < 3 {
			seeds = append(seeds[:len(seeds):len(seeds)], x.Addr())
		}
		time.Sleep(25 * time.Millisecond)
	}
	deadline := time.Now().Add(120 * time.Second)
	for !slices.ContainsFunc(nodes, func(x *member) bool { return x.Alive() == n }) || slices.ContainsFunc(nodes, func(x *member) bool { return x.Alive() != n }) {
		if time.Now().After(deadline) { // the row still says what the cores could do
			whole := 0
			for _, x := range nodes {
				if x.Alive() == n {
					whole++
				}
			}
			fmt.Printf("after 120 s %d of %d agents see all: the cores are saturated\n", whole, n)
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if !idle {
		for _, x := range nodes {
			go x.drive(x.ctx)
		}
	}
	time.Sleep(8 * time.Second) // the news of the joins is told
	runtime.GC()

	var was, is sums
	for _, x := range nodes {
		was.add(x.Stats())
	}
	cpu, failedWas, began := cpuTime(), failed.get(), time.Now()
	var ages []time.Duration
	for time.Since(began) < window {
		time.Sleep(20 * time.Millisecond)
		for range 64 {
			a, b := nodes[rand.IntN(n)], nodes[rand.IntN(n)]
			a.mu.Lock()
			at, ok := a.heardAt[b.boot]
			a.mu.Unlock()
			if ok {
				ages = append(ages, time.Since(at))
			}
		}
	}
	secs := time.Since(began).Seconds()
	cpu = cpuTime() - cpu
	for _, x := range nodes {
		is.add(x.Stats())
	}
	slices.Sort(ages)
	ms := func(p float64) float64 { return ages[int(p*float64(len(ages)-1))].Seconds() * 1000 }
	per := secs * float64(n)
	packets := float64(is.packets-was.packets) / per
	size := 90.0
	if key {
		size = 119
	}
	var mem runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&mem)
	return gossipRow{
		n: n, records: float64(is.made-was.made) / per, p50: ms(.5), p99: ms(.99), cpu: 100 * cpu.Seconds() / per, packets: packets,
		kib: (float64(is.bytes-was.bytes)/per + 28*packets) / 1024, recordKiB: float64(is.sent-was.sent) / per * size / 1024,
		heap: mem.HeapAlloc / uint64(n) >> 10, failed: failed.get() - failedWas,
	}, nil
}

// sums adds up counters over the agents.
type sums struct{ made, sent, packets, bytes uint64 }

func (s *sums) add(x gossip.Stats) {
	s.made += x.RecordsMade
	s.sent += x.RecordsSent
	s.packets += x.Packets
	s.bytes += x.Bytes
}

func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r) // cannot fail for ourselves
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
