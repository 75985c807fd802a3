package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// mortal is a network whose agents can be killed: all their connections end at once, and nobody reaches them any more.
type mortal struct {
	net   *memNet
	mu    sync.Mutex
	conns map[int][]net.Conn // by agent, those that it dialled and those that it accepted
	dead  map[int]bool
}

// owner is the number of the agent that an address belongs to, or -1.
func owner(addr string) int {
	var n int
	for _, f := range []string{"agent%d:80", "peer%d:80"} {
		if _, err := fmt.Sscanf(addr, f, &n); err == nil {
			return n - 1
		}
	}
	return -1
}

func (m *mortal) dial(from int) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		to := owner(addr)
		m.mu.Lock()
		dead := m.dead[from] || m.dead[to]
		m.mu.Unlock()
		if dead {
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		}
		c, err := m.net.dial(ctx, network, addr)
		if err == nil {
			m.mu.Lock()
			m.conns[from], m.conns[to] = append(m.conns[from], c), append(m.conns[to], c)
			m.mu.Unlock()
		}
		return c, err
	}
}

func (m *mortal) kill(i int) {
	m.mu.Lock()
	m.dead[i] = true
	all := m.conns[i]
	m.mu.Unlock()
	for _, c := range all {
		_ = c.Close()
	}
}

func (m *mortal) isDead(i int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead[i]
}

// stepRunning is when the engine has the request.
const stepRunning = "running"

// runs is what an engine did with the request that moves.
type runs struct {
	mu    sync.Mutex
	list  []run
	onRun func() // called at the beginning of each
}

type run struct {
	engine     int
	begin, end time.Time // of the engine's connection
	whole      bool
}

// workEngine answers in 300 ms, or, for the request in front of it, in 3 s.
func (r *runs) workEngine(i int) *scripted {
	return engine(func(_ int, w http.ResponseWriter, req *http.Request) {
		wait := 300 * time.Millisecond
		own := req.Header.Get("X-Request-Id") == "mover"
		if !own {
			wait = 3 * time.Second
		}
		var k int
		if own {
			r.mu.Lock()
			k = len(r.list)
			r.list = append(r.list, run{engine: i, begin: time.Now()})
			r.mu.Unlock()
			r.onRun()
			defer func() {
				r.mu.Lock()
				r.list[k].end = time.Now()
				r.mu.Unlock()
			}()
		}
		eventHead(w)
		select {
		case <-time.After(wait):
		case <-req.Context().Done():
			return
		}
		say(w, roleChunk)
		say(w, chunk("answer"))
		say(w, finishChunk)
		say(w, doneChunk)
		if own && req.Context().Err() == nil {
			r.mu.Lock()
			r.list[k].whole = true
			r.mu.Unlock()
		}
	})
}

// stealStory is one run of the protocol. Agent 0 is always the entry.
type stealStory struct {
	victim, thief int
	step          string // at which
	at            int    // the agent that reaches it
	kill          int    // … this one is killed; -1 = nobody
}

type stealEnd struct {
	status  int
	body    string
	err     error
	runs    []run
	victims Metrics
	thieves Metrics
	entries Metrics
}

func (s stealStory) play(t *testing.T) stealEnd {
	t.Helper()
	m := &mortal{net: &memNet{}, conns: map[int][]net.Conn{}, dead: map[int]bool{}}
	rs := &runs{}
	var once sync.Once
	rs.onRun = func() {
		if s.step == stepRunning && s.kill >= 0 {
			once.Do(func() { m.kill(s.kill) })
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	f := newFleet(t, nil, func(i int, c *Config) {
		c.Dial = m.dial(i)
		own := uint64(i + 1)
		order := inOrder{own}
		if i == 0 { // the entry chooses the victim, and whoever lives if that fails
			order = inOrder{uint64(s.victim + 1), 1, 2, 3}
		}
		c.Policy = order
		c.Step = func(step string) {
			if step == s.step && i == s.at && s.kill >= 0 {
				once.Do(func() { m.kill(s.kill) })
			}
		}
	}, rs.workEngine(0), rs.workEngine(1), rs.workEngine(2))
	m.net = f.net
	withVersion(f)
	for _, p := range f.agents {
		for boot := range uint64(3) {
			p.cfg.Table.SetModels(boot+1, []routing.Model{{ID: "m"}}, 0, time.Now())
		}
	}
	var bg sync.WaitGroup
	for _, p := range f.agents {
		bg.Go(func() { _ = p.Run(ctx) })
	}
	bg.Go(func() { f.gossip(ctx, m, s.thief) })

	hc := &http.Client{Transport: &http.Transport{DialContext: m.dial(-2), DisableKeepAlives: true}}
	post := func(ctx context.Context, i int, id, body string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, "POST", "http://"+f.clients[i]+chatPath, strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		return hc.Do(req)
	}
	// Something long is in front of it at the victim, and at the agent that is neither, so that only the thief is idle.
	for i := range 3 {
		if i != s.thief {
			bg.Go(func() {
				p := f.agents[i]
				p.cfg.Policy = inOrder{uint64(i + 1)}
				if resp, err := post(ctx, i, "blocker", longBody(20_000, true)); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			})
		}
	}
	synctest.Wait()
	f.agents[0].cfg.Policy = inOrder{uint64(s.victim + 1), 1, 2, 3}
	var end stealEnd
	resp, err := post(t.Context(), 0, "mover", longBody(1000, true))
	if err == nil {
		end.status = resp.StatusCode
		var b []byte
		b, err = io.ReadAll(resp.Body)
		end.body = string(b)
		_ = resp.Body.Close()
	}
	end.err = err
	time.Sleep(5 * time.Second) // nothing may go on behind the client's back
	end.entries, end.victims, end.thieves = f.metrics(0), f.metrics(s.victim), f.metrics(s.thief)
	cancel()
	bg.Wait()
	f.stop()
	rs.mu.Lock()
	defer rs.mu.Unlock()
	end.runs = append([]run(nil), rs.list...)
	return end
}

// gossip tells all agents' loads to the others every 20 ms, and wakes the thief.
func (f *fleet) gossip(ctx context.Context, m *mortal, thief int) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for seq := uint32(1); ; seq++ {
		for i, p := range f.agents {
			if m.isDead(i) {
				continue
			}
			l := p.Load()
			for j, q := range f.agents {
				q.cfg.Table.Update(routing.Report{Boot: uint64(i + 1), Seq: seq, State: routing.StateReady, Heartbeat: time.Second,
					Running: routing.Some(l.Running), Waiting: routing.Some(l.Waiting), Held: routing.Some(l.Held), HeldTokens: routing.Some(l.HeldTokens),
					PendingTokens: routing.Some(l.PendingTokens), PrefillRate: routing.Some(5000.0)}, time.Now())
				if j == thief && i != j && l.Held > 0 {
					q.Wake()
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// twice reports whether two runs were under way at the same time for more than a second.
func twice(list []run) bool {
	for i, a := range list {
		for _, b := range list[i+1:] {
			begin, end := a.begin, a.end
			if b.begin.After(begin) {
				begin = b.begin
			}
			if b.end.Before(end) {
				end = b.end
			}
			if end.Sub(begin) > time.Second {
				return true
			}
		}
	}
	return false
}

// An idle agent takes a held request, whichever of the three the entry is; the client notices nothing.
func TestStealing(t *testing.T) {
	for _, s := range []stealStory{
		{victim: 1, thief: 2, kill: -1}, // entry is neither
		{victim: 0, thief: 2, kill: -1}, // entry is the victim
		{victim: 1, thief: 0, kill: -1}, // entry is the thief
	} {
		t.Run(fmt.Sprintf("victim %d thief %d", s.victim, s.thief), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := s.play(t)
				require.NoError(t, e.err)
				assert.Equal(t, 200, e.status)
				assert.Contains(t, e.body, "answer")
				assert.Contains(t, e.body, "[DONE]")
				require.Len(t, e.runs, 1)
				assert.Equal(t, s.thief, e.runs[0].engine)
				assert.EqualValues(t, 1, e.victims.Gate.Stolen)
				assert.EqualValues(t, 1, e.thieves.Steal.Given)
				assert.EqualValues(t, 1, e.thieves.Steal.Came)
				assert.EqualValues(t, 1, e.entries.Steal.Moved)
				assert.Zero(t, e.entries.Retries[retryRefused]+e.entries.Retries[retryBusy]+e.entries.Retries[retryDial])
			})
		})
	}
}

// Whoever is killed at whatever step: nothing is lost where the entry lives, and nothing runs twice.
func TestStealingSurvivesKills(t *testing.T) {
	entries := []struct {
		name          string
		victim, thief int
	}{{"neither", 1, 2}, {"victim", 0, 2}, {"thief", 1, 0}}
	names := map[bool]string{true: "yes", false: "NO"}
	var table strings.Builder
	fmt.Fprintf(&table, "%-8s %-8s %-8s | %-6s %-5s %-6s\n", "entry is", "step", "killed", "answer", "runs", "twice")
	for _, e := range entries {
		steps := []struct {
			name string
			at   int
		}{{stepHeld, e.victim}, {stepPulled, e.victim}, {stepMoved, 0}, {stepInvited, e.thief}, {stepStarted, e.thief}, {stepRunning, e.thief}}
		for _, st := range steps {
			for _, who := range []string{"victim", "thief", "entry"} {
				s := stealStory{victim: e.victim, thief: e.thief, step: st.name, at: st.at}
				s.kill = map[string]int{"victim": e.victim, "thief": e.thief, "entry": 0}[who]
				if who != "entry" && s.kill == 0 {
					continue // the same as the entry
				}
				t.Run(fmt.Sprintf("entry %s, %s, %s killed", e.name, st.name, who), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						end := s.play(t)
						ok := end.err == nil && end.status == 200 && strings.Contains(end.body, "[DONE]")
						fmt.Fprintf(&table, "%-8s %-8s %-8s | %-6s %-5d %-6v\n", e.name, st.name, who, names[ok], len(end.runs), twice(end.runs))
						if who != "entry" {
							assert.True(t, ok, "lost: %d %q %v", end.status, end.body, end.err)
						} else {
							assert.False(t, ok)
						}
						assert.False(t, twice(end.runs), "%v", end.runs)
						whole := 0
						for _, r := range end.runs {
							require.False(t, r.end.IsZero(), "a run goes on")
							if r.whole {
								whole++
							}
						}
						assert.LessOrEqual(t, whole, 1)
					})
				})
			}
		}
	}
	t.Log("\n" + table.String())
}

// What cannot be sent again, and what was moved once, stays.
func TestFixedRequestsAreNotGiven(t *testing.T) {
	tab := routing.NewTable(routing.Member{Boot: 1})
	now := time.Now()
	tab.SetMember(routing.Member{Boot: 2, Version: 1}, now)
	tab.SetModels(2, []routing.Model{{ID: "m"}}, 0, now)
	thief := routing.Thief{Rate: 10_000}
	for name, c := range map[string]struct {
		change func(h *hold)
		given  bool
	}{
		"plain":                        {func(*hold) {}, true},
		"moved once":                   {func(h *hold) { h.fixed = true }, false},
		"the thief lacks the model":    {func(h *hold) { h.req.Model = "other" }, false},
		"nearly its turn anyway":       {func(h *hold) { h.tokens, h.req.PromptTokens = 60_000, 60_000 }, false},
		"it is tried and failed there": {func(h *hold) { h.req.Tried = []uint64{2} }, false},
	} {
		g := newTestGate()
		_, _ = g.arrive(newHold(5000), 0, now)
		h := newHold(1000)
		h.req.Model = "m"
		c.change(h)
		_, _ = g.arrive(h, 0, now)
		tokens := g.give(tab, tab.Peer(2), 7, thief, now)
		assert.Equal(t, c.given, tokens > 0, name)
		if c.given {
			l := <-h.ready
			assert.Equal(t, leave{how: leftStolen, thief: 2, ticket: 7}, l)
			n, tok := g.load()
			assert.Zero(t, n+tok)
		}
		g.close()
	}
}

func TestTickets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate()
		defer g.close()
		now := time.Now()
		_, _ = g.arrive(newHold(5000), 0, now)
		g.tickets = map[uint64]ticket{7: {until: now.Add(ticketFor)}, 8: {until: now.Add(ticketFor)}}
		p, _ := g.arrive(newHold(1000), 7, now)
		assert.NotNil(t, p, "valid")
		p, _ = g.arrive(newHold(1000), 7, now)
		assert.Nil(t, p, "used")
		p, _ = g.arrive(newHold(1000), 99, now)
		assert.Nil(t, p, "unknown")
		p, _ = g.arrive(newHold(1000), 8, now.Add(ticketFor))
		assert.Nil(t, p, "expired")
	})
}

func TestMovedHeader(t *testing.T) {
	l, ok := movedTo("1f 2a")
	assert.True(t, ok)
	assert.Equal(t, leave{how: leftStolen, thief: 0x1f, ticket: 0x2a}, l)
	for _, bad := range []string{"", "1f", "1f 0", "0 1", "x y", "1f 2a 3"} {
		_, ok := movedTo(bad)
		assert.False(t, ok, bad)
	}
}
