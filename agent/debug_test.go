package agent

import (
	"bytes"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDebugIsLocal: profiles and the flight recorder are for this host; neither a token nor a forwarded request opens them.
func TestDebugIsLocal(t *testing.T) {
	h := testConsole().handler()
	for _, page := range []struct {
		method, path string
		code         int // from this host; 0 = it would take too long
	}{
		{"GET", "/debug/pprof/", 200},
		{"GET", "/debug/pprof/goroutine?debug=1", 200},
		{"GET", "/debug/pprof/cmdline", 200},
		{"GET", "/debug/pprof/symbol", 200},
		{"GET", "/debug/pprof/profile?seconds=1", 0},
		{"GET", "/debug/pprof/trace?seconds=0.1", 200},
		{"GET", "/debug/flight", 409},
		{"POST", "/debug/flight/stop", 409},
		{"POST", "/debug/flight/start", 200},
		{"POST", "/debug/flight/stop", 200},
	} {
		for _, row := range []struct {
			remote, host, token, forwarded string
			local                          bool
		}{
			{"10.0.0.1:1", "127.0.0.1:8082", "", "", false},
			{"10.0.0.1:1", "agent:8082", "s3cret", "", false},
			{"127.0.0.1:1", "rebound.example:8082", "", "", false},
			{"127.0.0.1:1", "127.0.0.1:8082", "", "10.0.0.1", false},
			{"127.0.0.1:1", "127.0.0.1:8082", "", "", true},
		} {
			if row.local && page.code == 0 {
				continue
			}
			r := httptest.NewRequest(page.method, page.path, nil)
			r.RemoteAddr, r.Host = row.remote, row.host
			if row.token != "" {
				r.Header.Set("Authorization", "Bearer "+row.token)
			}
			if row.forwarded != "" {
				r.Header.Set("X-Forwarded-For", row.forwarded)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			want := 403
			if row.local {
				want = page.code
			}
			assert.Equal(t, want, w.Code, "%s %s %+v", page.method, page.path, row)
		}
	}
}

// The recorder has the last seconds when somebody asks for them, and a process has one.
func TestFlightRecorder(t *testing.T) {
	var f, other flight
	require.NoError(t, f.start())
	defer f.stop()
	assert.ErrorContains(t, f.start(), "already")
	assert.Error(t, other.start())
	w := httptest.NewRecorder()
	f.serve(w, nil)
	assert.Equal(t, 200, w.Code)
	assert.True(t, bytes.HasPrefix(w.Body.Bytes(), []byte("go 1.")), "%.20q", w.Body.String())
	assert.True(t, f.stop())
	assert.False(t, f.stop())
	require.NoError(t, other.start())
	assert.True(t, other.stop())
}
