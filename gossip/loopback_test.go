package gossip_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/routing"
)

// agent is a node with what it heard.
type agent struct {
	*gossip.Node
	boot  uint64
	stop  context.CancelFunc
	ended chan struct{}
	err   error
	log   *safeLog
	table atomic.Pointer[routing.Table] // nil: nobody picks here

	mu      sync.Mutex
	events  []string // "joined n.0000", in order
	alive   map[uint64]routing.Member
	reports map[uint64]routing.Report
	heardAt map[uint64]time.Time
	count   map[uint64]int
	delta   routing.Delta
	block   chan struct{} // OnMember waits for it
	offBy   time.Duration // largest gap between two records of one boot
}

type safeLog struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *safeLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *safeLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start makes and runs an agent. The name stands for the pod.
func start(t testing.TB, name string, boot uint64, cfg gossip.Config) *agent {
	t.Helper()
	a := build(t, name, boot, cfg)
	a.run()
	t.Cleanup(a.end)
	return a
}

func build(t testing.TB, name string, boot uint64, cfg gossip.Config) *agent {
	t.Helper()
	a := &agent{
		boot: boot, ended: make(chan struct{}), log: &safeLog{},
		alive: map[uint64]routing.Member{}, reports: map[uint64]routing.Report{}, heardAt: map[uint64]time.Time{}, count: map[uint64]int{},
	}
	cfg.NodeName = name
	cfg.Member = routing.Member{Boot: boot, Addr: ":8081", Zone: "z", Engine: "vllm"}
	if cfg.Listen != "" { // real sockets: all on one host, so each needs a port of its own
		cfg.Member.Addr = fmt.Sprintf(":%d", 8081+(boot>>32)%0xA)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(a.log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
	cfg.OnMember = func(m routing.Member, e gossip.MemberEvent) {
		if t := a.table.Load(); t != nil && e.Alive() {
			t.SetMember(m, time.Now())
		} else if t != nil {
			t.RemoveMember(m.Boot, time.Now())
		}
		a.mu.Lock()
		block := a.block
		a.mu.Unlock()
		if block != nil {
			<-block
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.events = append(a.events, e.String()+" "+m.Node)
		if e.Alive() {
			a.alive[m.Boot] = m
		} else {
			delete(a.alive, m.Boot)
		}
	}
	cfg.OnReport = func(r routing.Report) {
		if t := a.table.Load(); t != nil {
			t.Update(r, time.Now())
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		now := time.Now()
		if at, ok := a.heardAt[r.Boot]; ok {
			a.offBy = max(a.offBy, now.Sub(at))
		}
		a.reports[r.Boot], a.heardAt[r.Boot] = r, now
		a.count[r.Boot]++
	}
	cfg.OnDelta = func(d routing.Delta) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.delta = d
	}
	n, err := gossip.New(cfg)
	require.NoError(t, err)
	a.Node = n
	return a
}

func (a *agent) run() {
	ctx, cancel := context.WithCancel(context.Background())
	a.stop = cancel
	go func() {
		defer close(a.ended)
		a.err = a.Run(ctx)
	}()
}

// end is for clean-ups: it does not wait for the leave.
func (a *agent) end() {
	a.kill()
	a.stop()
}

// kill ends it as a crash does.
func (a *agent) kill() {
	a.Close()
	<-a.ended
}

func (a *agent) peers() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.alive)
}

func (a *agent) report(boot uint64) routing.Report {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reports[boot]
}

func (a *agent) knows(boot uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, ok := a.alive[boot]
	return ok
}

func (a *agent) saw(event string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.events {
		if strings.HasPrefix(e, event) {
			return true
		}
	}
	return false
}

func load(running int) routing.Report {
	return routing.Report{State: routing.StateReady, Running: routing.Some(running), Waiting: routing.Some(0), PrefillRate: routing.Some(8000.0)}
}

// Two agents over real sockets: join, records both ways, a change within 200 ms, leave.
func TestLoopback(t *testing.T) {
	key, err := gossip.ParseKeys("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	require.NoError(t, err)
	cfg := gossip.Config{Listen: "127.0.0.1:0", Cluster: "test", Keys: key}
	a := start(t, "a", 0xA00000001, cfg)
	a.Offer(load(1))
	cfg.Join = []string{a.Addr()}
	b := start(t, "b", 0xB00000001, cfg)
	b.Offer(load(2))
	began := time.Now()
	require.Eventually(t, func() bool {
		return a.report(b.boot).Running == routing.Some(2) && b.report(a.boot).Running == routing.Some(1)
	}, 3*time.Second, 5*time.Millisecond)
	t.Logf("records both ways %v after the second start", time.Since(began))

	assert.Equal(t, 2, a.Alive())
	assert.Equal(t, "127.0.0.1:8081", b.alive[a.boot].Addr)
	assert.Equal(t, "z", b.alive[a.boot].Zone)
	assert.Equal(t, "vllm", b.alive[a.boot].Engine)
	assert.Equal(t, gossip.ProtocolVersion, b.alive[a.boot].Version)
	assert.Equal(t, "a.0000000a", b.alive[a.boot].Node)

	time.Sleep(300 * time.Millisecond)
	r := load(1)
	r.Flags = routing.FlagDraining
	began = time.Now()
	<-a.PublishNow(r, 3)
	assert.Less(t, time.Since(began), time.Second)
	require.Eventually(t, func() bool { return b.report(a.boot).Flags == routing.FlagDraining }, time.Second, time.Millisecond)

	delta := routing.Delta{Boot: a.boot, Seq: 7, Added: []uint32{1, 2}, Dropped: []uint32{3}}
	a.SendDelta(&delta)
	require.Eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.delta.Seq == 7
	}, time.Second, time.Millisecond)
	assert.Equal(t, delta, b.delta)

	a.Describe("sglang", routing.Some[uint32](5))
	require.Eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.alive[a.boot].Engine == "sglang"
	}, 3*time.Second, 10*time.Millisecond)

	began = time.Now()
	a.stop()
	require.Eventually(t, func() bool { return b.report(a.boot).Goodbye }, time.Second, time.Millisecond)
	t.Logf("goodbye after %v", time.Since(began))
	<-a.ended
	require.NoError(t, a.err)
	assert.Less(t, time.Since(began), 4*time.Second)
	require.Eventually(t, func() bool { return b.saw("left a.") }, 2*time.Second, 10*time.Millisecond)
	assert.False(t, b.saw("failed"))
	for line := range strings.Lines(a.log.String() + b.log.String()) {
		// A probe under way when its node closes is no error of ours; all else would be.
		if !strings.Contains(line, "use of closed network connection") {
			assert.NotContains(t, line, "level=ERROR")
		}
	}

	s := b.Stats()
	assert.Equal(t, 1, s.Members)
	assert.True(t, s.Keyed)
	assert.NotZero(t, s.RecordsSent)
	assert.NotZero(t, s.RecordsHeard)
	assert.LessOrEqual(t, s.LargestPacket, 1245)
}

func (l *safeLog) count(s string) int { return strings.Count(l.String(), s) }
