package engine

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A llama.cpp that sleeps is not woken by being read: /slots would do that.
func TestReadingDoesNotWakeLlamaCpp(t *testing.T) {
	var asleep, busy atomic.Bool
	var slots atomic.Int32
	f := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			if busy.Load() {
				_, _ = w.Write([]byte("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"))
			} else {
				_, _ = w.Write([]byte("llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"))
			}
		case "/props":
			if asleep.Load() {
				_, _ = w.Write([]byte(`{"is_sleeping":true}`))
			} else {
				_, _ = w.Write([]byte(`{"is_sleeping":false}`))
			}
		case "/slots":
			slots.Add(1)
			_, _ = w.Write([]byte(`[{"id":0,"n_ctx":2048,"is_processing":false}]`))
		default:
			http.NotFound(w, r)
		}
	}))
	defer f.Close()
	u, err := url.Parse(f.URL)
	require.NoError(t, err)
	r := New(Config{URL: u, Kind: LlamaCpp})
	defer r.Close()
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, false, rd.Asleep.V)
	assert.True(t, rd.Asleep.OK)
	assert.EqualValues(t, 1, slots.Load())

	read := func() {
		for _, p := range r.current().pages {
			p.tried, p.at = p.tried.Add(-10*absentFor), p.at.Add(-10*absentFor) // as if time had passed
		}
		rd, err = r.Read(t.Context())
		require.NoError(t, err)
	}
	read()
	assert.EqualValues(t, 1, slots.Load(), "asked while it rested, which keeps it awake")
	assert.Equal(t, 1, rd.RunLimit.V, "what /slots said of an engine at rest holds")
	assert.True(t, rd.KVUsed.OK)
	busy.Store(true)
	read()
	read()
	assert.EqualValues(t, 3, slots.Load(), "asked each time while it works")
	busy.Store(false)
	read()
	read()
	assert.EqualValues(t, 4, slots.Load(), "asked once more when it has come to rest")

	asleep.Store(true)
	read()
	assert.True(t, rd.Asleep.V)
	assert.EqualValues(t, 4, slots.Load(), "/slots was asked while it slept")
	assert.Equal(t, 0, rd.Running.V)
	assert.True(t, r.Abilities().WakesByItself)
}

// What comes up where an engine was refused is looked at again: it may be another kind.
func TestAnotherKindTakesTheEnginesPlace(t *testing.T) {
	page := func(metrics string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/metrics":
				_, _ = w.Write([]byte(metrics))
			case "/health":
			default:
				http.NotFound(w, r)
			}
		})
	}
	f := httptest.NewServer(page("vllm:num_requests_running 1\n"))
	u, err := url.Parse(f.URL)
	require.NoError(t, err)
	r := New(Config{URL: u})
	defer r.Close()
	assert.Equal(t, Healthy, r.Health(t.Context()).State)
	assert.Equal(t, VLLM, r.Kind())

	f.Close()
	r.client.CloseIdleConnections()
	assert.Equal(t, Down, r.Health(t.Context()).State)
	assert.Equal(t, VLLM, r.Kind(), "nothing is known yet of what comes next")

	l, err := listenAt(u.Host)
	require.NoError(t, err)
	g := httptest.NewUnstartedServer(page("llamacpp:requests_processing 3\n"))
	_ = g.Listener.Close()
	g.Listener = l
	g.Start()
	defer g.Close()
	assert.Equal(t, Healthy, r.Health(t.Context()).State)
	assert.Equal(t, LlamaCpp, r.Kind())
	rd, err := r.Read(t.Context())
	require.NoError(t, err)
	assert.Equal(t, 3, rd.Running.V)
}

func listenAt(addr string) (net.Listener, error) {
	var d net.ListenConfig
	return d.Listen(context.Background(), "tcp", addr)
}
