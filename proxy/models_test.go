package proxy

import (
	"encoding/json"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/routing"
)

// C109, C21: the union over live replicas, unique by id, fields verbatim, without asking anybody.
func TestC109Models(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := answers(200, "from the engine")
		raw := func(s string) json.RawMessage { return json.RawMessage(s) }
		f := newFleet(t, []uint64{1}, func(_ int, c *Config) {
			c.Models = func() []ModelEntry {
				return []ModelEntry{
					{"z", raw(`{"id":"z","object":"model","created":7,"max_model_len":4096,"x":{"odd":[1]}}`)},
					{"org/m", raw(`{"id":"org/m","owned_by":"one"}`)},
					{"org/m", raw(`{"id":"org/m","owned_by":"two"}`)},
				}
			}
		}, e)
		get := func(path string) (int, string, string) {
			resp, err := f.hc.Get("http://" + f.clients[0] + path)
			require.NoError(t, err)
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			return resp.StatusCode, string(b), resp.Header.Get("Content-Type")
		}
		status, body, ctype := get("/v1/models")
		assert.Equal(t, 200, status)
		assert.Equal(t, "application/json", ctype)
		sameBytes(t, `{"object":"list","data":[{"id":"org/m","owned_by":"one"},{"id":"z","object":"model","created":7,"max_model_len":4096,"x":{"odd":[1]}}]}`, body)
		for _, p := range []string{"/v1/models/org%2Fm", "/v1/models/org/m"} {
			status, body, _ = get(p)
			assert.Equal(t, 200, status, p)
			sameBytes(t, `{"id":"org/m","owned_by":"one"}`, body)
		}
		assert.Zero(t, e.count(), "nobody was asked")

		status, body, _ = get("/v1/models/alias") // the policy knows a replica for it: the engine answers
		assert.Equal(t, 200, status)
		assert.Equal(t, "from the engine", body)

		f.agents[0].cfg.Policy = nobodyBecause(routing.ReasonUnknownModel)
		status, body, _ = get("/v1/models/nope")
		assert.Equal(t, 404, status)
		assert.Contains(t, body, "model_not_found")

		f.agents[0].cfg.Models = nil
		status, body, _ = get("/v1/models")
		assert.Equal(t, 200, status)
		sameBytes(t, `{"object":"list","data":[]}`, body)
		resp, err := f.hc.Head("http://" + f.clients[0] + "/v1/models")
		require.NoError(t, err)
		assert.Equal(t, 200, resp.StatusCode)
		assert.EqualValues(t, 27, resp.ContentLength)
		time.Sleep(time.Second)
		f.idle()
	})
}
