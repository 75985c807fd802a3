package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOwnersForget(t *testing.T) {
	var o owners
	now := time.Now()
	for i := range ownedMost + 10 {
		o.note(fmt.Sprintf("resp_%d", i), now)
	}
	assert.False(t, o.has("resp_0", now))
	assert.True(t, o.has("resp_10", now))
	assert.True(t, o.has(fmt.Sprintf("resp_%d", ownedMost+9), now))
	assert.LessOrEqual(t, len(o.until), ownedMost)
	for range 3 * ownedMost { // one id again and again must not push others out, nor grow
		o.note("file-1", now)
	}
	assert.LessOrEqual(t, len(o.order), ownedMost)
	assert.True(t, o.has("file-1", now))
	assert.False(t, o.has("file-1", now.Add(ownedFor)))
	o.note("new", now.Add(2*ownedFor))
	assert.Equal(t, 1, len(o.until))
}

// Stored objects are asked for where they were made, whoever the entry is.
func TestStoredObjectsGoBackToTheirMaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		make1 := func(who string) *scripted {
			return engine(func(n int, w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				id := map[string]string{"/v1/responses": "resp_", "/v1/files": "file-", "/v1/batches": "batch_"}[r.URL.Path]
				_, _ = fmt.Fprintf(w, `{"id":"%s%s%d","object":"x","made_by":%q}`, id, who, n, who)
			})
		}
		engines := []*scripted{make1("a"), make1("b"), make1("c")}
		f := newFleet(t, []uint64{2, 3, 1}, nil, engines[0], engines[1], engines[2])
		withVersion(f)
		call := func(agent int, method, path, body string) string {
			req, err := http.NewRequest(method, "http://"+f.clients[agent]+path, strings.NewReader(body))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			resp, err := f.hc.Do(req)
			require.NoError(t, err)
			b := make([]byte, 1000)
			n, _ := resp.Body.Read(b)
			_ = resp.Body.Close()
			settle()
			return string(b[:n])
		}
		// The policy sends the request to b.
		require.Contains(t, call(0, "POST", "/v1/responses", `{"model":"m","input":"x"}`), `"resp_b1"`)
		for agent := range 3 {
			assert.Contains(t, call(agent, "GET", "/v1/responses/resp_b1", ""), `"made_by":"b"`)
			assert.Contains(t, call(agent, "GET", "/v1/responses/resp_b1/input_items", ""), `"made_by":"b"`)
		}
		f.agents[0].cfg.Policy = inOrder{3, 1, 2}
		assert.Contains(t, call(0, "POST", "/v1/responses", `{"model":"m","input":"y","previous_response_id":"resp_b1"}`), `"made_by":"b"`)
		// A file stays where it entered, and the batch that reads it follows it.
		require.Contains(t, call(2, "POST", "/v1/files", `{}`), `"file-c1"`)
		assert.Contains(t, call(0, "POST", "/v1/batches", `{"input_file_id": "file-c1"}`), `"made_by":"c"`)
		assert.Contains(t, call(1, "GET", "/v1/files/file-c1/content", ""), `"made_by":"c"`)
		// Nobody knows it: the own engine says so.
		assert.Contains(t, call(1, "GET", "/v1/responses/resp_unknown", ""), `"made_by":"b"`)
		// It is never sent a second time.
		engines[1].f = func(int, http.ResponseWriter, *http.Request) { die() }
		before := engines[0].count() + engines[2].count()
		call(0, "GET", "/v1/responses/resp_b1", "")
		assert.Equal(t, before, engines[0].count()+engines[2].count())
		time.Sleep(ownedFor)
		engines[1].f = make1("b").f
		assert.Contains(t, call(0, "GET", "/v1/responses/resp_b1", ""), `"made_by":"a"`, "forgotten after an hour")
		f.idle()
	})
}
