package agent

import (
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestDebugIsLocal: profiles are for this host; neither a token nor a forwarded request opens them.
func TestDebugIsLocal(t *testing.T) {
	h := testConsole().handler()
	for _, row := range []struct {
		remote, host, token, forwarded string
		code                           int
	}{
		{"127.0.0.1:1", "127.0.0.1:8082", "", "", 200},
		{"10.0.0.1:1", "127.0.0.1:8082", "", "", 403},
		{"10.0.0.1:1", "agent:8082", "s3cret", "", 403},
		{"127.0.0.1:1", "rebound.example:8082", "", "", 403},
		{"127.0.0.1:1", "127.0.0.1:8082", "", "10.0.0.1", 403},
	} {
		r := httptest.NewRequest("GET", "/debug/pprof/goroutine?debug=1", nil)
		r.RemoteAddr, r.Host = row.remote, row.host
		if row.token != "" {
			r.Header.Set("Authorization", "Bearer "+row.token)
		}
		if row.forwarded != "" {
			r.Header.Set("X-Forwarded-For", row.forwarded)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		assert.Equal(t, row.code, w.Code, "%+v", row)
	}
}
