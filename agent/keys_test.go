package agent

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gossip"
	"github.com/grapevine-lb/grapevine/proxy/peertls"
)

func ringKey(b byte) (text, id string) {
	k := bytes.Repeat([]byte{b}, 32)
	return base64.StdEncoding.EncodeToString(k), gossip.KeyID(k)
}

// linkIDs are the names that the same keys have between agents.
func linkIDs(of ...byte) (out []string) {
	for _, b := range of {
		id, _ := peertls.KeyID(bytes.Repeat([]byte{b}, 32))
		out = append(out, id)
	}
	return out
}

// keysOf is what GET /keys says.
func keysOf(t *testing.T, r *runner) (ids []string, raw string) {
	t.Helper()
	resp, err := http.Get("http://" + r.Addresses().Status + "/keys")
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var keys []gossip.KeyInfo
	require.NoError(t, json.Unmarshal(b, &keys))
	for _, k := range keys {
		ids = append(ids, k.ID)
	}
	return ids, string(b)
}

// A changed key file reaches gossip and the links between agents; a broken one changes nothing; the command's changes work
// for this host only. No key is ever shown or logged.
func TestKeysAreReadAgain(t *testing.T) {
	t.Parallel()
	engine := httptest.NewServer(http.NotFoundHandler())
	defer engine.Close()
	a, idA := ringKey('a')
	b, idB := ringKey('b')
	c, idC := ringKey('c')
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(a), 0o600))
	cfg := loopbackConfig(engine.URL)
	cfg.GossipKey, cfg.GossipKeyFile = a, file
	r := start(t, cfg, Options{})
	ids, _ := keysOf(t, r)
	assert.Equal(t, []string{idA}, ids)

	require.NoError(t, os.WriteFile(file, []byte(b+"\n"+a+"\n"), 0o600))
	require.Eventually(t, func() bool { ids, _ = keysOf(t, r); return len(ids) == 2 }, 10*time.Second, 50*time.Millisecond)
	assert.Equal(t, []string{idB, idA}, ids)
	assert.Eventually(t, func() bool { return slices.Equal(linkIDs('b', 'a'), r.tls.KeyIDs()) }, 5*time.Second, 10*time.Millisecond)

	require.NoError(t, os.WriteFile(file, []byte("no key at all"), 0o600))
	require.Eventually(t, func() bool { return strings.Contains(r.log.String(), MsgKeyFile) }, 10*time.Second, 50*time.Millisecond)
	ids, _ = keysOf(t, r)
	assert.Equal(t, []string{idB, idA}, ids, "the keys stay")

	post := func(path, body string, header ...string) int {
		req, err := http.NewRequest("POST", "http://"+r.Addresses().Status+path, strings.NewReader(body))
		require.NoError(t, err)
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	assert.Equal(t, 403, post("/keys/install", c, "X-Forwarded-For", "203.0.113.9"), "not from elsewhere")
	assert.Equal(t, 403, post("/keys/remove", idA, "Authorization", "Bearer guess"))
	assert.Equal(t, 403, post("/keys/remove", idA, "Sec-Fetch-Site", "cross-site", "Origin", "http://evil.example"))
	assert.Equal(t, 400, post("/keys/install", "short"))
	assert.Equal(t, 400, post("/keys/melt", "x"))
	assert.Equal(t, 200, post("/keys/install", c))
	assert.Equal(t, 200, post("/keys/use", idC))
	assert.Equal(t, 200, post("/keys/remove", idA))
	assert.Equal(t, 400, post("/keys/remove", idA), "it is gone")
	ids, raw := keysOf(t, r)
	assert.Equal(t, []string{idC, idB}, ids)
	assert.Equal(t, linkIDs('c', 'b'), r.tls.KeyIDs())
	assert.Equal(t, 200, post("/keys/remove", idB))
	assert.Equal(t, 400, post("/keys/remove", idC), "the last one stays")
	for _, k := range []string{a, b, c} {
		assert.NotContains(t, r.log.String(), k)
		assert.NotContains(t, raw, k)
	}
}

// The connections of a member that left end when their time is over, and it gets no new ones (node.HasLeft).
func TestLeftMembersLoseTheirConnections(t *testing.T) {
	a := &Agent{}
	now := time.Now()
	a.noteLeft(7, now)
	a.dropLeft(now.Add(leftGrace - 1))
	assert.Len(t, a.ring.left, 1, "its last streams may end")
	a.dropLeft(now.Add(leftGrace))
	assert.Empty(t, a.ring.left)
}
