package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Three agents with three engines answer at each address, see each other, and go in order.
func TestSmoke(t *testing.T) {
	s := harness.New(t)
	_, urls := fakes(s, 3)
	agents := s.Mesh(urls)

	var client harness.Client
	defer client.Close()
	for _, a := range agents {
		for _, stream := range []bool{false, true} {
			got := client.Do(t.Context(), a.URL, harness.Chat{Model: harness.FakeModel, Prompt: "hello", MaxTokens: 8, Stream: stream})
			require.NoError(t, got.Err, "%v", got)
			assert.NotEmpty(t, got.Content)
		}
		code, body := harness.Get(a.URL + "/v1/models")
		require.Equal(t, http.StatusOK, code, body)
		var models struct{ Data []struct{ ID string } }
		require.NoError(t, json.Unmarshal([]byte(body), &models))
		require.Len(t, models.Data, 1, "the union over three replicas with the same model")
		assert.Equal(t, harness.FakeModel, models.Data[0].ID)

		got := client.Do(t.Context(), a.URL, harness.Chat{Model: "no-such-model", Prompt: "hello"})
		require.Equal(t, http.StatusNotFound, got.Status, "%s", got.Body)
		assert.Contains(t, string(got.Body), "model_not_found")

		r, err := a.Report()
		require.NoError(t, err)
		assert.True(t, r.Ready)
		assert.Equal(t, "ready", r.State)
		assert.Len(t, r.Peers, 3, "every replica, its own included")
		for _, page := range []string{"/", "/metrics", "/livez"} {
			code, body := harness.Get(a.Status + page)
			assert.Equal(t, http.StatusOK, code, "%s: %s", page, body)
		}
	}
	for _, a := range agents {
		a.Signal(syscall.SIGTERM)
	}
	for _, a := range agents {
		assert.Equal(t, "exit 0", a.Wait(10*time.Second), "%s", a.Name)
	}
	for _, a := range agents {
		assert.NotContains(t, a.Log(), "level=ERROR", "%s", a.Name)
		assert.NotContains(t, a.Log(), "panic:", "%s", a.Name)
		assert.NotContains(t, a.Log(), "DATA RACE", "%s", a.Name)
	}
}

// A second agent at the same addresses is refused with the address in one line, not with a stack.
func TestPortTaken(t *testing.T) {
	longOnly(t)
	s := harness.New(t).Size(1)
	e := s.FakeEngine(1)
	first := s.Agent(1, e.URL)
	first.WaitReady(10 * time.Second)
	second := s.Agent(1, e.URL)
	assert.Equal(t, "exit 1", second.Wait(5*time.Second))
	lines := strings.Split(strings.TrimSpace(second.Log()), "\n")
	assert.Contains(t, lines[len(lines)-1], fmt.Sprintf("%s:", s.IP(1)))
	code, _ := first.Readyz()
	assert.Equal(t, http.StatusOK, code, "the first is not disturbed")
}
