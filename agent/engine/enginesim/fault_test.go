package enginesim

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func (h *harness) fault(body string) {
	h.t.Helper()
	r := h.post("/fault", body)
	require.Equal(h.t, 200, r.status, r.body)
}

func TestSlow(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		h.fault(`{"kind":"slow","factor":5}`)
		assert.Equal(t, time.Second, h.post(chatPath, ask("hi", 10, true)).took)
		h.fault(`{"kind":"clear","only":"slow"}`)
		assert.Equal(t, 200*time.Millisecond, h.post(chatPath, ask("ho", 10, true)).took)
	})
}

func TestHangAndResume(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		time.AfterFunc(300*time.Millisecond, func() { assert.NoError(t, h.Inject(Fault{Kind: "hang", For: 10 * time.Second})) })
		time.AfterFunc(time.Second, func() { assert.Equal(t, 200, h.get("/health").status, "pages answer") })
		r := h.post(chatPath, ask("hi", 50, true))
		assert.Equal(t, 11*time.Second, r.took)
		assert.True(t, parse(t, r.body).done)
	})
}

func TestHangOfTheWholeProcess(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		require.NoError(t, h.Inject(Fault{Kind: "hang", Pages: true, For: 10 * time.Second}))
		ctx, cancel := context.WithTimeout(h.t.Context(), time.Second)
		defer cancel()
		require.Error(t, h.do(ctx, "GET", "/health", "").err)
		r := h.get("/health")
		assert.Equal(t, 200, r.status)
		assert.Equal(t, 9*time.Second, r.took, "answers when the process goes on")
	})
}

func TestSilenceSendsCommentsOnly(t *testing.T) {
	bubble(t, ServerConfig{Dialect: "llamacpp"}, func(h *harness) {
		time.AfterFunc(110*time.Millisecond, func() { assert.NoError(t, h.Inject(Fault{Kind: "silence"})) })
		ctx, cancel := context.WithTimeout(h.t.Context(), 5*time.Second)
		defer cancel()
		r := h.do(ctx, "POST", chatPath, ask("hi", 50, true))
		require.Error(t, r.err)
		assert.Equal(t, 4, strings.Count(r.body, "\n:\n"), "one a second")
		assert.Equal(t, 1+5, strings.Count(r.body, "data: "), "what came before")
		h.Clear("")
	})
}

func TestBrokenStreams(t *testing.T) {
	for kind, c := range map[string]struct {
		fails, done bool
		finish      string
		outcome     string
	}{
		"reset":       {true, false, "", "reset"},
		"cut":         {true, false, "", "cut"},
		"abort":       {false, true, "abort", "abort"},
		"engine-dead": {false, true, "", "engine-dead"},
	} {
		t.Run(kind, func(t *testing.T) {
			bubble(t, ServerConfig{}, func(h *harness) {
				require.NoError(t, h.Inject(Fault{Kind: kind, After: 5, Count: 1}))
				r := h.post(chatPath, ask("hi", 50, true))
				assert.Equal(t, c.fails, r.err != nil)
				s := parse(t, r.body)
				assert.Len(t, s.text, 20, "five tokens came")
				assert.Equal(t, c.done, s.done)
				assert.Equal(t, c.finish, s.finish)
				assert.Equal(t, kind == "engine-dead", s.errorObject != nil)
				assert.Equal(t, 100*time.Millisecond, r.took)
				synctest.Wait()
				assert.Zero(t, h.Stats().Running, "the slot is free at once")
				assert.Equal(t, c.outcome, h.Journal()[0].Outcome)
				assert.True(t, parse(t, h.post(chatPath, ask("hi", 50, true)).body).done, "the next one is spared")
			})
		})
	}
}

func TestBrokenWholeReplies(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		require.NoError(t, h.Inject(Fault{Kind: "cut", After: 5, Count: 1}))
		require.Error(t, h.post(chatPath, ask("hi", 50, false)).err)
		require.NoError(t, h.Inject(Fault{Kind: "engine-dead", After: 5, Count: 1}))
		r := h.post(chatPath, ask("hi", 50, false))
		assert.Equal(t, 500, r.status)
		assert.Contains(t, r.body, "EngineCore encountered an issue")
	})
}

func TestAbortStrikesTheWaitingToo(t *testing.T) {
	bubble(t, ServerConfig{Params: Rates(10_000, 20*time.Millisecond, 1)}, func(h *harness) {
		time.AfterFunc(time.Second, func() { assert.NoError(t, h.Inject(Fault{Kind: "abort"})) })
		for _, r := range h.together(ask("a", 500, true), ask("b", 500, true)) {
			s := parse(t, r.body)
			assert.Equal(t, "abort", s.finish)
			assert.Equal(t, time.Second, r.took)
		}
		h.Clear("")
	})
}

func TestRefusedAtOnce(t *testing.T) {
	for kind, c := range map[string]struct {
		status int
		says   string
		health int
	}{
		"error500": {500, "Internal Server Error", 200},
		"busy":     {503, "currently busy", 200},
		"shutdown": {500, "cannot schedule new futures after shutdown", 200},
		"loading":  {503, "loading", 503},
	} {
		bubble(t, ServerConfig{}, func(h *harness) {
			require.NoError(t, h.Inject(Fault{Kind: kind, For: time.Minute}))
			r := h.post(chatPath, ask("hi", 50, true))
			assert.Equal(t, c.status, r.status, kind)
			assert.Contains(t, r.body, c.says)
			assert.Zero(t, r.took)
			assert.Equal(t, c.health, h.get("/health").status)
			if kind != "loading" {
				assert.Equal(t, kind, h.Journal()[0].Outcome, "the refused are counted too")
			}
			time.Sleep(time.Minute)
			assert.Equal(t, 200, h.post(chatPath, ask("hi", 5, true)).status, "over after a minute")
		})
	}
}

func TestUnhealthyAndAsleep(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		h.fault(`{"kind":"unhealthy"}`)
		assert.Equal(t, 503, h.get("/health").status)
		h.fault(`{"kind":"clear"}`)
		h.fault(`{"kind":"sleep"}`)
		assert.Equal(t, 200, h.get("/health").status)
		assert.Contains(t, h.get("/metrics").body, `sleep_state="awake"} 0.0`)
		assert.Equal(t, `{"is_sleeping":true}`, h.get("/is_sleeping").body)
		h.fault(`{"kind":"clear"}`)
	})
}

func TestDieAndRevive(t *testing.T) {
	bubble(t, ServerConfig{LoadFor: 3 * time.Second}, func(h *harness) {
		assert.Equal(t, 503, h.get("/health").status, "the model loads")
		time.Sleep(3 * time.Second)
		long := strings.Repeat("long", 3000)
		assert.Equal(t, 200, h.post(chatPath, ask(long, 1, false)).status)
		require.NoError(t, h.Inject(Fault{Kind: "die", After: 10}))
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(100 * time.Millisecond)
			r := h.post(chatPath, ask("other", 1000, false))
			assert.Error(t, r.err, "dies with the first")
		})
		r := h.post(chatPath, ask("hi", 50, true))
		require.Error(t, r.err)
		assert.Len(t, parse(t, r.body).text, 40, "ten tokens came")
		wg.Wait()
		assert.True(t, h.Stats().Dead)
		require.Error(t, h.get("/health").err, "nobody there")
		for _, e := range h.Journal()[1:] {
			assert.Equal(t, "lost", e.Outcome)
		}
		h.Clear("")
		h.Revive()
		assert.Equal(t, 503, h.get("/health").status, "loads again")
		time.Sleep(3 * time.Second)
		assert.Contains(t, h.post(chatPath, ask(long, 1, false)).body, `"cached_tokens":0`, "the cache is cold")
	})
}

func TestDeadlyPrompts(t *testing.T) {
	for phase, tokens := range map[string]int{"prefill": 0, "decode": 3} {
		bubble(t, ServerConfig{}, func(h *harness) {
			require.NoError(t, h.Inject(Fault{Kind: "deadly", Marker: "poison", Phase: phase}))
			assert.NoError(t, h.post(chatPath, ask("harmless", 10, true)).err)
			var wg sync.WaitGroup
			wg.Go(func() { assert.Error(t, h.post(chatPath, ask("beside it", 1000, true)).err) })
			time.Sleep(time.Second)
			r := h.post(chatPath, ask("a poisoned prompt", 50, true))
			require.Error(t, r.err)
			assert.LessOrEqual(t, len(parse(t, r.body).text), tokens*bytesPerToken)
			wg.Wait()
			assert.True(t, h.Stats().Dead)
			assert.Equal(t, tokens, h.Journal()[2].Tokens)
			h.Revive()
		})
	}
}

func TestWrongFaultsAreExplained(t *testing.T) {
	bubble(t, ServerConfig{}, func(h *harness) {
		for body, says := range map[string]string{
			`{"kind":"explode"}`:                           "unknown fault",
			`{"kind":"slow"}`:                              "positive factor",
			`{"kind":"deadly"}`:                            "needs a marker",
			`{"kind":"deadly","marker":"x","phase":"now"}`: "phase",
			`{"kind":"hang","for":"soon"}`:                 "soon",
			`{"kind":"hang","after":-1}`:                   "negative",
		} {
			r := h.post("/fault", body)
			assert.Equal(t, 400, r.status, body)
			assert.Contains(t, r.body, says)
		}
		assert.Equal(t, "[]", h.get("/fault").body)
	})
}

// Real sockets: a refusing engine does not listen, and a reset is a reset.
func TestRefuseAndResetOnRealSockets(t *testing.T) {
	s, err := NewServer(ServerConfig{Params: Rates(10_000, 5*time.Millisecond, 4)})
	require.NoError(t, err)
	address := serveTCP(t, s)
	get := func() error {
		resp, err := http.Get("http://" + address + "/health")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err
	}
	require.NoError(t, get())
	require.NoError(t, s.Inject(Fault{Kind: "refuse", For: 300 * time.Millisecond}))
	require.Eventually(t, func() bool {
		_, err := net.Dial("tcp", address)
		return err != nil && strings.Contains(err.Error(), "refused")
	}, time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return get() == nil }, 3*time.Second, 10*time.Millisecond)

	require.NoError(t, s.Inject(Fault{Kind: "reset", After: 3}))
	resp, err := http.Post("http://"+address+chatPath, "application/json", strings.NewReader(ask("hi", 50, true)))
	require.NoError(t, err)
	defer resp.Body.Close()
	buf := make([]byte, 1<<16)
	for err == nil {
		_, err = resp.Body.Read(buf)
	}
	assert.Contains(t, err.Error(), "reset by peer")
}
