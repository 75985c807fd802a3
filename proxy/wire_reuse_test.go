package proxy

import (
	"io"
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// At an answer's end its connection may serve another exchange at once. The first one still asks for the end, the
// trailer and Close, and must not touch what is the other's by then.
func TestEndedBodyLeavesItsConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := engine(func(n int, w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, []string{"first", "other"}[n-1])
		})
		f := newFleet(t, []uint64{1}, nil, e)
		ask := func() *Answer {
			a, err := f.agents[0].engine.Send(t.Context(), &Outgoing{Method: "POST", Target: chatPath, Host: "x"})
			require.NoError(t, err)
			return a
		}
		first := ask()
		p := make([]byte, 5)
		_, err := io.ReadFull(first.Body, p)
		require.NoError(t, err)
		assert.Equal(t, "first", string(p))
		if *std {
			_, _ = io.ReadAll(first.Body) // net/http gives the connection back with the end
		}

		second := ask()
		n, err := first.Body.Read(p)
		assert.Zero(t, n)
		assert.ErrorIs(t, err, io.EOF)
		assert.Empty(t, first.Trailer())
		_ = first.Body.Close()
		b, err := io.ReadAll(second.Body)
		require.NoError(t, err)
		assert.Equal(t, "other", string(b))
		assert.Equal(t, 1, f.conns[0].seen, "over one connection")
	})
}

// requestAllocs is what a small request may allocate: its id.
const requestAllocs = 1

func TestRequestAllocations(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	reply := []byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	s, _ := onScript(t, func() ([]byte, error) { return reply, nil })
	req := chatRequest(2048, false)
	serveScript(s, req, 100)
	const n = 100
	got := testing.AllocsPerRun(5, func() { serveScript(s, req, n) }) / n
	assert.LessOrEqual(t, got, float64(requestAllocs)+0.5)
}
