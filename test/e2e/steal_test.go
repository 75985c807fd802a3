package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// stealKill is one run of the steal protocol between real processes: the agent that reaches the step stops there, another one
// or the same is killed with signal 9, and the first goes on.
type stealKill struct {
	victim, thief int // agent numbers; the entry is 1
	step          string
	at, kill      int
}

// stealEnd is what became of the request.
type stealEnd struct {
	answered bool
	runs     []harness.Run
	twice    []string
}

const (
	stepRunning = "running" // the engine has it; the other steps are package proxy's
	moverID     = "mover"
)

func (k stealKill) play(t *testing.T) (end stealEnd) {
	s := harness.New(t).Program("./test/testagent").Size(3)
	_, urls := fakes(s, 3, "-prefill-rate", "10000", "-slots", "32")
	agents := make([]*harness.Agent, 4)
	for n := 1; n <= 3; n++ {
		env := harness.Env{"TESTAGENT_ORDER": "agent1,agent2,agent3"}
		if n == 1 {
			rest := slices.DeleteFunc([]string{"agent1", "agent2", "agent3"}, func(a string) bool { return a == fmt.Sprint("agent", k.victim) })
			env["TESTAGENT_ORDER"] = fmt.Sprintf("agent%d,%s", k.victim, strings.Join(rest, ","))
		}
		if n == k.at && k.step != stepRunning {
			env["TESTAGENT_STOP"] = k.step
		}
		agents[n] = s.Agent(n, urls[n-1], env)
	}
	for _, a := range agents[1:] {
		a.WaitReady(20 * time.Second)
		a.WaitMembers(3, 20*time.Second)
	}
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	post := func(n int, id string, tokens int) (string, error) {
		body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":20,"messages":[{"role":"user","content":"%s %s"}]}`, harness.FakeModel, id,
			strings.Repeat("word", tokens))
		req, err := http.NewRequestWithContext(ctx, "POST", agents[n].URL+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			return "", err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		resp, err := hc.Do(req)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	// Something long is in front of it at the victim, and at the agent that is neither, so that only the thief is idle.
	var bg sync.WaitGroup
	defer bg.Wait()
	for n := 1; n <= 3; n++ {
		if n != k.thief {
			bg.Go(func() { _, _ = post(n, fmt.Sprint("blocker", n), 40_000) })
		}
	}
	blocked := func() bool {
		return len(slices.DeleteFunc(s.Runs(), func(r harness.Run) bool { return !strings.HasPrefix(r.RequestID, "blocker") })) == 2
	}
	harness.Eventually(t, 10*time.Second, "two engines to be busy", blocked)
	type answer struct {
		body string
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		body, err := post(1, moverID, 1000)
		got <- answer{body, err}
	}()
	mine := func() []harness.Run {
		return slices.DeleteFunc(s.Runs(), func(r harness.Run) bool { return r.RequestID != moverID })
	}
	harness.Eventually(t, 10*time.Second, "the step "+k.step, func() bool {
		if k.step == stepRunning {
			return len(mine()) > 0
		}
		return stopped(agents[k.at].Pid())
	})
	agents[k.kill].Kill()
	if k.step != stepRunning && k.at != k.kill {
		agents[k.at].Signal(syscall.SIGCONT)
	}
	a := <-got
	end.answered = a.err == nil && strings.Contains(a.body, "[DONE]") && !strings.Contains(a.body, `"error"`)
	time.Sleep(2500 * time.Millisecond) // nothing may go on behind the client's back
	cancel()
	end.runs = mine()
	end.twice = harness.Twice(end.runs, time.Second)
	return end
}

// stopped reports whether a process has stopped itself.
func stopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, ok := strings.Cut(string(b), ") ")
	return err == nil && ok && strings.HasPrefix(rest, "T")
}

// Whoever of real processes is killed at whatever step of the protocol: nothing is lost where the entry lives, and nothing
// runs twice.
func TestStealKills(t *testing.T) {
	longOnly(t)
	var mu sync.Mutex
	var rows []string
	t.Cleanup(func() {
		slices.Sort(rows)
		t.Logf("\n%-8s %-8s %-7s | answer runs twice\n%s", "entry is", "step", "killed", strings.Join(rows, "\n"))
	})
	for _, e := range []struct {
		name          string
		victim, thief int
	}{{"neither", 2, 3}, {"victim", 1, 3}, {"thief", 2, 1}} {
		for _, st := range []struct {
			name string
			at   int
		}{{"held", e.victim}, {"pulled", e.victim}, {"moved", 1}, {"invited", e.thief}, {"started", e.thief}, {stepRunning, e.thief}} {
			for who, kill := range map[string]int{"victim": e.victim, "thief": e.thief, "entry": 1} {
				if who != "entry" && kill == 1 {
					continue // the same as the entry
				}
				t.Run(fmt.Sprintf("entry %s, %s, %s killed", e.name, st.name, who), func(t *testing.T) {
					t.Parallel()
					end := stealKill{victim: e.victim, thief: e.thief, step: st.name, at: st.at, kill: kill}.play(t)
					mu.Lock()
					rows = append(rows, fmt.Sprintf("%-8s %-8s %-7s | %-6v %-4d %d", e.name, st.name, who, end.answered, len(end.runs), len(end.twice)))
					mu.Unlock()
					if who == "entry" {
						assert.False(t, end.answered)
					} else {
						assert.True(t, end.answered, "lost")
					}
					assert.Empty(t, end.twice)
				})
			}
		}
	}
}
