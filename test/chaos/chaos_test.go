package chaos

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// noneLost is what must hold where an engine dies, hangs or is rolled and its agent lives, or the requests entered elsewhere:
// no request without content fails, and at least 99 % of the eligible streams end with the full text.
func (r *result) noneLost() {
	r.f.t.Helper()
	r.sound()
	assert.Empty(r.f.t, r.noContent, "failed without content")
	broken := len(r.cutText)
	assert.LessOrEqual(r.f.t, float64(broken), 0.01*r.continued, "eligible streams that were cut, of those that were to be continued")
}

func (f *fleet) everywhere(workers int) []*group {
	return []*group{{name: "all", workers: workers, targets: f.entries()}}
}

func TestKillEngine(t *testing.T) {
	f := newFleet(t, 3, nil)
	r := f.run(f.everywhere(24), func() {
		f.engines[1].Kill()
		time.Sleep(dur(4 * time.Second))
	}, func() { f.restartEngine(1) })
	r.row("kill -9 engine")
	r.noneLost()
	assert.Positive(t, r.continued, "no stream was hit")
}

func TestKillAgent(t *testing.T) {
	longOnly(t)
	// In turn, so that much of what enters elsewhere is at the agent that is killed; the default would keep it at an idle entry.
	f := newFleet(t, 3, nil, harness.Env{"GRAPEVINE_POLICY": "round_robin"})
	elsewhere := &group{name: "elsewhere", workers: 16, targets: f.entries(0, 2)}
	// Clients of the killed agent repeat at any address, as official clients do behind one name.
	there := &group{name: "there", workers: 8, repeats: 2}
	var killed atomic.Bool
	there.targets = func() []string {
		if killed.Load() {
			return f.entries(0, 2)()
		}
		return f.entries(1)()
	}
	r := f.run([]*group{elsewhere, there}, func() {
		f.keep(f.agents[1])
		f.agents[1].Kill()
		killed.Store(true)
		time.Sleep(4 * time.Second)
	}, func() {
		f.agents[1].Start()
		f.agents[1].WaitReady(30 * time.Second)
	})
	part := func(g *group) *result {
		p := &result{f: f, replies: g.replies}
		p.judge()
		return p
	}
	a, b := part(elsewhere), part(there)
	a.row("kill -9 agent: entered elsewhere")
	b.row("kill -9 agent: entered there")
	a.noneLost()
	r.sound()
	assert.Empty(t, b.noContent, "clients with default retries")
	assert.Positive(t, a.continued, "no stream was hit")
}

func TestStopEngine(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil, harness.Env{"GRAPEVINE_IDLE_TIMEOUT": "3s"})
	f.stopped[1] = true
	r := f.run(f.everywhere(24), func() {
		f.engines[1].Signal(syscall.SIGSTOP)
		time.Sleep(5 * time.Second)
		f.engines[1].Signal(syscall.SIGCONT)
	}, nil)
	r.row("SIGSTOP engine 5 s")
	r.noneLost()
}

func TestStopAgent(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil, harness.Env{"GRAPEVINE_IDLE_TIMEOUT": "3s"})
	f.stopped[1] = true
	r := f.run([]*group{{name: "elsewhere", workers: 20, targets: f.entries(0, 2)}}, func() {
		f.agents[1].Signal(syscall.SIGSTOP)
		time.Sleep(5 * time.Second)
		f.agents[1].Signal(syscall.SIGCONT)
	}, nil)
	r.row("SIGSTOP agent 5 s: entered elsewhere")
	r.noneLost()
}

func TestSilentHang(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil, harness.Env{"GRAPEVINE_IDLE_TIMEOUT": "2s", "GRAPEVINE_FIRST_BYTE_TIMEOUT": "20s"})
	r := f.run(f.everywhere(24), func() {
		f.engines[1].Fault(map[string]any{"kind": "hang", "pages": true, "for": "12s"})
		time.Sleep(12 * time.Second)
	}, nil)
	r.row("engine hangs silently")
	r.noneLost()
}

func TestFast500(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 4, nil)
	r := f.run(f.everywhere(24), func() {
		f.engines[1].Fault(map[string]any{"kind": "error500", "for": "12s"})
		time.Sleep(12 * time.Second)
	}, nil)
	r.row("500 at once")
	r.sound()
	failed := 0
	for _, run := range f.s.Runs() {
		if run.Outcome == "error500" {
			failed++
		}
	}
	during := 0
	for _, q := range r.replies {
		if q.start.After(f.broke) && q.start.Before(f.healed) {
			during++
		}
	}
	t.Logf("%d of %d requests reached the failing replica in 12 s, %d clients saw it", failed, during, len(r.noContent))
	assert.Less(t, float64(failed), 0.04*float64(during)+5*float64(len(f.agents)), "a replica that fails fast attracts no traffic")
}

func TestRefuse(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil)
	r := f.run(f.everywhere(24), func() {
		f.engines[1].Fault(map[string]any{"kind": "refuse", "for": "4s"})
		time.Sleep(4 * time.Second)
	}, nil)
	r.row("refuse, then recover")
	r.noneLost()
}

func TestSlow(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil)
	r := f.run(f.everywhere(24), func() {
		f.engines[1].Fault(map[string]any{"kind": "slow", "factor": 5, "for": "8s"})
		time.Sleep(8 * time.Second)
	}, nil)
	r.row("slow × 5")
	r.noneLost()
	assert.Empty(t, r.cut)
}

// Each replica in turn: its agent drains and exits, its engine with it, both start anew.
func TestRoll(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil)
	g := f.everywhere(20)
	g[0].targets = f.s.Ready(f.agents, 100*time.Millisecond)
	r := f.run(g, func() {
		for i := range f.agents {
			f.keep(f.agents[i])
			require.Equal(t, "exit 0", f.agents[i].Term(40*time.Second))
			f.engines[i].Signal(syscall.SIGTERM)
			<-f.engines[i].Done()
			f.engines[i] = f.s.FakeEngine(i+1, f.args...)
			f.agents[i].Start()
			f.agents[i].WaitReady(30 * time.Second)
			f.agents[i].WaitMembers(3, 20*time.Second)
		}
	}, nil)
	r.row("roll all replicas")
	r.noneLost()
	assert.Empty(t, r.cut, "streams are shorter than the drain timeout")
}

func TestAllButOneDie(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 4, nil)
	r := f.run(f.everywhere(16), func() {
		var wg sync.WaitGroup
		for _, e := range f.engines[1:] {
			wg.Go(e.Kill)
		}
		wg.Wait()
		time.Sleep(5 * time.Second)
	}, func() {
		for i := range f.engines[1:] {
			f.restartEngine(i + 1)
		}
	})
	r.row("all but one engine die")
	r.noneLost()
}

// A prompt that kills each engine that works on it, among others.
func TestDeadly(t *testing.T) {
	longOnly(t)
	for phase, most := range map[string]int{"prefill": 2, "decode": 3} {
		t.Run(phase, func(t *testing.T) {
			f := newFleet(t, 5, nil)
			for _, e := range f.engines {
				e.Fault(map[string]any{"kind": "deadly", "marker": "DEADLY", "phase": phase})
			}
			var killer reply
			dead := 0
			r := f.run(f.everywhere(30), func() {
				killer = reply{ask: ask{n: int(asked.Add(1)), prompt: "DEADLY", tokens: 20, stream: true, eligible: true}, entry: f.agents[4].URL, start: time.Now(), tries: 1}
				killer.do()
				time.Sleep(2 * time.Second)
				for _, e := range f.engines {
					if !e.Alive() {
						dead++
					}
				}
			}, func() {
				for i, e := range f.engines {
					if !e.Alive() {
						f.restartEngine(i)
					}
				}
			})
			r.row("deadly prompt in " + phase)
			t.Logf("%d engines died; its client got status %d, %v", dead, killer.status, killer.err)
			require.Error(t, killer.err)
			assert.LessOrEqual(t, dead, most)
			assert.Positive(t, dead)
			r.sound()
			for _, q := range r.replies {
				assert.False(t, q.err != nil && strings.Contains(q.err.Error(), "request_refused"), "chaos-%d is called deadly: %v", q.n, q.err)
			}
		})
	}
}

// Three times what two engines can do, for half a minute, and beside it a few requests of the highest class, for which a third
// engine is kept. The engines are like vLLM: they tell no limit and their own queue has no end.
func TestOverload(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, []string{"-slots", "4", "-decode-step", "20ms"}, harness.Env{"GRAPEVINE_QUEUE_TIMEOUT": "3s", "GRAPEVINE_QUEUE_LIMIT": "16", "GRAPEVINE_TRUST_PRIORITY": "true"})
	f.agents[2].Kill() // the stage sets one environment for all
	f.agents[2] = f.s.Agent(3, f.engines[2].URL, harness.Env{"GRAPEVINE_CLASSES": "priority", "GRAPEVINE_TRUST_PRIORITY": "true"})
	for _, a := range f.agents {
		a.WaitReady(20 * time.Second)
		a.WaitMembers(3, 20*time.Second)
	}
	// 8 slots, 25 tokens of 20 ms each: 16 requests/s at the most.
	over := &group{name: "over", workers: 480, targets: f.entries(), rate: 48.0 / 480, tokens: [2]int{25, 25}}
	high := &group{name: "high", workers: 12, targets: f.entries(), rate: 4.0 / 12, tokens: [2]int{6, 6}, ask: func(q *ask) { q.priority, q.stream, q.eligible = "priority", true, true }}
	rss := func() (kb int64) {
		for _, a := range f.agents {
			kb += rssOf(t, a.Pid())
		}
		return kb
	}
	var early, late int64
	o := &result{f: f}
	r := f.run([]*group{high}, func() {
		time.Sleep(8 * time.Second)
		f.broke = time.Now()
		load := startLoad(over)
		defer load.stop()
		time.Sleep(10 * time.Second)
		early = rss()
		time.Sleep(20 * time.Second)
		late = rss()
		f.healed = time.Now()
		o.replies = load.end()
	}, nil)
	f.healed = f.broke.Add(30 * time.Second)
	r = &result{f: f, replies: r.replies}
	r.judge()
	o.judge()
	o.row("overload × 3, 30 s: default class")
	r.row("overload × 3, 30 s: priority class")
	r.sound()
	o.sound()
	good := 0
	var refusals []time.Duration
	for _, q := range o.replies {
		switch {
		case q.err == nil && q.start.Add(q.total).After(f.broke) && q.start.Add(q.total).Before(f.healed):
			good++
		case q.status == http.StatusTooManyRequests:
			assert.NotEmpty(t, q.retry, "Retry-After")
			if q.total < 2*time.Second { // the others had waited in a queue first
				refusals = append(refusals, q.total)
			}
		}
	}
	perSecond := float64(good) / 30
	// For the first seconds the agents do not know what the engines can do, and those take what they are given.
	learned := f.broke.Add(5 * time.Second)
	failed := 0
	var unloaded, loaded []time.Duration
	for _, q := range r.replies {
		switch {
		case q.err != nil:
			if q.start.After(learned) {
				failed++
			}
		case q.start.Add(q.total).Before(f.broke):
			unloaded = append(unloaded, q.ttft)
		case q.start.After(learned) && q.start.Before(f.healed):
			loaded = append(loaded, q.ttft)
		}
	}
	t.Logf("priority class: median TTFT %v unloaded, %v in the overload", quantile(unloaded, 0.5), quantile(loaded, 0.5))
	quiet, busy := quantile(unloaded, 0.99), quantile(loaded, 0.99)
	t.Logf("goodput %.1f requests/s of 16; %d refused on arrival, median after %v, p90 %v; RSS of the agents %d KB at 10 s, %d KB at the end, %.3f of it; "+
		"priority class: p99 TTFT %v of %d unloaded, %v of %d in the overload", perSecond, len(refusals), quantile(refusals, 0.5), quantile(refusals, 0.9),
		early, late, float64(late)/float64(early), quiet, len(unloaded), busy, len(loaded))
	assert.GreaterOrEqual(t, perSecond, 0.95*16)
	assert.Greater(t, len(refusals), 100)
	assert.Less(t, quantile(refusals, 0.5), 10*time.Millisecond)
	assert.LessOrEqual(t, float64(late), 1.1*float64(early))
	assert.Zero(t, failed, "of the highest class")
	assert.LessOrEqual(t, busy, 2*max(quiet, 100*time.Millisecond), "two cores for all of it")
}

// Fifty requests with a picture of 10 MB each, at once, on an idle fleet: none is refused.
func TestLargeImages(t *testing.T) {
	longOnly(t)
	// Clients, agents and engines share two cores, on which 670 MB of JSON take their time.
	f := newFleet(t, 2, nil, harness.Env{"GRAPEVINE_QUEUE_TIMEOUT": "120s"})
	picture := strings.Repeat("iVBORw0KGgo", 10<<20/8) // 10 MB are a third more in base64
	picture = picture[:10<<20/3*4]
	var wg sync.WaitGroup
	var mu sync.Mutex
	answers, shed := map[int]int{}, 0
	var slowest time.Duration
	for i := range 50 {
		wg.Go(func() {
			// The official clients write the messages first and the model last.
			body := io.MultiReader(strings.NewReader(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,`),
				strings.NewReader(picture), strings.NewReader(fmt.Sprintf(`"}},{"type":"text","text":"What is in picture %d?"}]}],"max_tokens":20,"model":%q}`, i, harness.FakeModel)))
			req, err := http.NewRequest(http.MethodPost, f.agents[i%2].URL+"/v1/chat/completions", body)
			if !assert.NoError(t, err) {
				return
			}
			req.Header.Set("Content-Type", "application/json")
			start := time.Now()
			resp, err := transport.RoundTrip(req)
			if !assert.NoError(t, err) {
				return
			}
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			assert.NoError(t, err)
			if resp.StatusCode != http.StatusOK {
				t.Logf("%s", text)
			}
			mu.Lock()
			defer mu.Unlock()
			answers[resp.StatusCode]++
			switch resp.Header.Get("X-Grapevine-Reason") {
			case "body_memory", "queue_full", "queue_timeout", "long_wait", "all_full", "max_inflight":
				shed++
			}
			slowest = max(slowest, time.Since(start))
		})
	}
	wg.Wait()
	t.Logf("answers by status: %v; the slowest after %v; RSS %d and %d KB", answers, slowest.Round(time.Millisecond), rssOf(t, f.agents[0].Pid()), rssOf(t, f.agents[1].Pid()))
	// On a machine that does much else a simulated engine may be too slow to tell that it lives; that is no refusal.
	assert.Zero(t, shed)
	assert.Greater(t, answers[http.StatusOK], 25)
}

// Two zones of two replicas; one is lost, agents and all.
func TestZoneLost(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 4, nil)
	for i, a := range f.agents { // the stage sets one environment for all: start anew with zones
		a.Kill()
		f.agents[i] = f.s.Agent(i+1, f.engines[i].URL, harness.Env{"GRAPEVINE_ZONE": "zone" + string(rune('a'+i/2))})
	}
	for _, a := range f.agents {
		a.WaitReady(20 * time.Second)
		a.WaitMembers(4, 20*time.Second)
	}
	here := &group{name: "zone a", workers: 20, targets: f.entries(0, 1)}
	r := f.run([]*group{here}, func() {
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(f.agents[2+i].Kill)
			wg.Go(f.engines[2+i].Kill)
		}
		wg.Wait()
		time.Sleep(5 * time.Second)
	}, nil)
	r.row("zone lost: entered in the other")
	r.noneLost()
}

// The kubelet ends a pod: with hooks the drain begins first and the engine goes when it is empty; without, the engine gets
// SIGTERM at once and the agent behind it.
func TestKubelet(t *testing.T) {
	longOnly(t)
	for name, hooks := range map[string]bool{"with hooks": true, "without hooks": false} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, 3, nil)
			g := f.everywhere(20)
			g[0].targets = f.s.Ready(f.agents, 100*time.Millisecond)
			r := f.run(g, func() {
				if hooks {
					var wg sync.WaitGroup
					wg.Go(func() { // sidecar's preStop: grapevine drain --no-wait
						resp, err := http.Post(f.agents[1].Status+"/drain", "", nil)
						if assert.NoError(t, err) {
							resp.Body.Close()
						}
					})
					wg.Go(func() { // engine's preStop
						resp, err := (&http.Client{Timeout: 60 * time.Second}).Get(f.agents[1].Status + "/drained")
						if assert.NoError(t, err) {
							resp.Body.Close()
						}
					})
					wg.Wait()
				}
				f.engines[1].Signal(syscall.SIGTERM)
				<-f.engines[1].Done()
				f.keep(f.agents[1])
				require.Equal(t, "exit 0", f.agents[1].Term(40*time.Second))
				f.engines[1] = f.s.FakeEngine(2, f.args...)
				f.agents[1].Start()
				f.agents[1].WaitReady(30 * time.Second)
			}, nil)
			r.row("kubelet's order, " + name)
			r.noneLost()
			if hooks {
				assert.Empty(t, r.cut)
			}
		})
	}
}
