package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/grapevine-lb/grapevine/routing"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func topFleet(n int) *agent.Status {
	s := &agent.Status{Node: "replica-0.aaaa0000", State: "ready", Warnings: []string{"gossip is not encrypted"}}
	for i := range n {
		s.Peers = append(s.Peers, agent.PeerStatus{Node: fmt.Sprintf("replica-%d.aaaa%04d", i, i), Self: i == 0, State: "ready", Zone: "zone-a",
			Running: routing.Some(i), Waiting: routing.Some(n - i), KVUsage: routing.Some(float64(i) / float64(n)), AgeMS: routing.Some(int64(100 + i))})
	}
	s.Peers[n-1].State, s.Peers[n-1].Why, s.Peers[n-1].Running = "ejected", "3 hard failures in a row", routing.Opt[int]{}
	return s
}

// TestTopFits: whatever the terminal, no line is wider and the frame is not higher, and the replicas' names and states are
// the last to go.
func TestTopFits(t *testing.T) {
	for _, n := range []int{1, 3, 30, 300} {
		for _, width := range []int{12, 20, 40, 60, 80, 120, 200} {
			for _, height := range []int{6, 24, 60} {
				v := topView{status: topFleet(n), width: width, height: height}
				lines := v.lines()
				assert.LessOrEqual(t, len(lines), height, "%d replicas on %dx%d", n, width, height)
				for _, l := range lines {
					require.LessOrEqual(t, utf8.RuneCountInString(l), width, "%d replicas on %dx%d: %q", n, width, height, l)
				}
				if width >= 40 {
					assert.Contains(t, strings.Join(lines, "\n"), "state")
				}
			}
		}
	}
	wide := strings.Join((&topView{status: topFleet(3), width: 160, height: 24}).lines(), "\n")
	for _, want := range []string{"why", "3 hard failures in a row", "zone-a", "101 ms", "replica-0.aaaa0000 *", "! gossip is not encrypted"} {
		assert.Contains(t, wide, want)
	}
}

func TestTopKeys(t *testing.T) {
	v := topView{status: topFleet(30), width: 80, height: 12}
	first := func() string {
		for i, l := range v.lines() {
			if strings.Contains(strings.ToLower(l), "state") {
				return strings.Fields(v.lines()[i+1])[0]
			}
		}
		return ""
	}
	assert.Equal(t, "replica-0.aaaa0000", first())
	v.key("r")
	assert.Equal(t, "replica-9.aaaa0009", first(), "by name, from the end")
	v.key("r")
	v.key("s")
	v.key("s")
	assert.Equal(t, "run", topNames()[v.sort])
	assert.Equal(t, "replica-28.aaaa0028", first(), "the busiest first, unknown is not busy")
	v.key("j")
	assert.Equal(t, "replica-27.aaaa0027", first())
	v.key("G")
	assert.Equal(t, "replica-29.aaaa0029", func() string { l := v.lines(); return strings.Fields(l[len(l)-2])[0] }(), "the end is shown")
	v.key("g")
	assert.Equal(t, "replica-28.aaaa0028", first())
	v.key(" ")
	assert.True(t, v.paused)
	assert.False(t, v.key("x"))
	assert.True(t, v.key("q"))
	assert.True(t, v.key("\x03"))
}

func TestTopOnce(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(topFleet(3)) }))
	defer srv.Close()
	code, out, errOut := run(nil, "top", "--once", "--url", srv.URL, "--sort", "wait")
	require.Zero(t, code, errOut)
	assert.Contains(t, out, "WAIT")
	assert.NotContains(t, out, "\x1b")
	code, _, errOut = run(nil, "top", "--sort", "colour", "--url", srv.URL)
	assert.Equal(t, 2, code)
	assert.Contains(t, errOut, "replica, state, run")
	code, _, _ = run(nil, "top", "--url", "127.0.0.1:9")
	assert.Equal(t, 1, code)
}
