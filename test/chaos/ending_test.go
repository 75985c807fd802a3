package chaos

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

// An engine gets SIGTERM and nobody told its agent: each engine ends in its own way, and no way loses a request.
func TestEngineTerm(t *testing.T) {
	longOnly(t)
	for _, c := range []struct{ name, dialect, mode string }{
		{"vLLM aborts its streams", "vllm", "abort"},
		{"vLLM answers 500 while /health is 200", "vllm", "drain"},
		{"SGLang lets nobody in", "sglang", "finish"},
		{"llama.cpp goes silent", "llamacpp", "silent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFleet(t, 3, []string{"-dialect", c.dialect, "-on-term", c.mode}, harness.Env{"GRAPEVINE_IDLE_TIMEOUT": "2s"})
			r := f.run(f.everywhere(20), func() {
				f.engines[1].Signal(syscall.SIGTERM)
				select {
				case <-f.engines[1].Done():
				case <-time.After(8 * time.Second): // llama.cpp and a vLLM whose clients stay take longer
				}
			}, nil)
			r.row("SIGTERM engine: " + c.name)
			r.noneLost()
		})
	}
}

// Streams that are longer than the drain timeout go on elsewhere at its end, whether they entered at the agent that goes or at
// another one; those that cannot end with an error.
func TestDrainDeadline(t *testing.T) {
	longOnly(t)
	f := newFleet(t, 3, nil, harness.Env{"GRAPEVINE_DRAIN_TIMEOUT": "1s", "GRAPEVINE_POLICY": "round_robin"})
	g := f.everywhere(30)
	g[0].tokens = [2]int{100, 250} // 1.5 to 4 s
	g[0].targets = f.s.Ready(f.agents, 50*time.Millisecond)
	r := f.run(g, func() {
		f.keep(f.agents[1])
		before := f.sum("grapevine_continues_total")
		require.Equal(t, "exit 0", f.agents[1].Term(20*time.Second))
		t.Logf("%.0f streams continued at other entries", f.sum("grapevine_continues_total")-before)
		f.agents[1].Start()
		f.agents[1].WaitReady(30 * time.Second)
	}, nil)
	r.row("drain timeout shorter than the streams")
	r.sound()
	assert.Empty(t, r.noContent)
	assert.Empty(t, r.cutText, "eligible streams")
	assert.Positive(t, r.continued)
}
