package agent

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Streams longer than the drain timeout leave the engine at its end and go on at a peer, unnoticed by their clients: one that
// entered at the agent that drains, and one that entered at the other.
func TestDrainTimeoutEmptiesTheEngine(t *testing.T) {
	t.Parallel()
	agents, _ := fleetOf(t, 2, slowStream(), func(c *Config) {
		c.DrainTimeout, c.Policy = 700*time.Millisecond, "round_robin"
	})
	going := agents[0]
	type stream struct {
		body io.ReadCloser
		head string
	}
	var streams []stream
	for i := range 8 {
		res, err := http.Post("http://"+agents[i%2].Addresses().Client+"/v1/chat/completions", "application/json",
			strings.NewReader(`{"model":"sim","messages":[{"role":"user","content":"hello there"}],"max_tokens":60,"stream":true}`))
		require.NoError(t, err)
		defer res.Body.Close()
		line, err := bufio.NewReaderSize(res.Body, 16).ReadString('\n')
		require.NoError(t, err)
		streams = append(streams, stream{res.Body, line})
	}
	before := going.proxy.Load()
	require.Positive(t, before.Running+before.Waiting, "something runs at the engine that is to be emptied")
	require.True(t, going.Drain())
	began := time.Now()
	code, said := going.get("/drained")
	assert.Equal(t, 200, code)
	assert.Equal(t, "drained\n", said)
	assert.Less(t, time.Since(began), 2*time.Second)
	for i, s := range streams {
		rest, err := io.ReadAll(s.body)
		require.NoError(t, err, "stream %d", i)
		assert.Contains(t, string(rest), "data: [DONE]", "stream %d", i)
		assert.NotContains(t, string(rest), `"error"`, "stream %d", i)
	}
	continued := uint64(0)
	for _, a := range agents {
		for labels, n := range a.proxy.Metrics().Continues {
			if strings.HasSuffix(labels, " ok") {
				continued += n
			}
		}
	}
	// On a busy machine one may end by itself before the timeout; none goes on twice.
	assert.Positive(t, continued)
	assert.LessOrEqual(t, continued, uint64(before.Running+before.Waiting))
}
