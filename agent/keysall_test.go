package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// One command installs, uses and removes a key at all agents; who does not have it in the end is named with the reason, and
// a removal that would cut somebody off is refused.
func TestKeysOfAll(t *testing.T) {
	t.Parallel()
	engine := httptest.NewServer(http.NotFoundHandler())
	defer engine.Close()
	oldKey, oldID := ringKey('a')
	newKey, newID := ringKey('b')
	var agents []*runner
	for i := range 3 {
		cfg := loopbackConfig(engine.URL)
		cfg.NodeName, cfg.GossipKey = fmt.Sprintf("agent%d", i), oldKey
		if i > 0 {
			cfg.Join = []string{agents[0].Addresses().Gossip}
		}
		agents = append(agents, start(t, cfg, Options{}))
	}
	together := func() bool {
		for _, r := range agents {
			if r.node.Alive() != len(agents) || len(r.table.Snapshot().Peers()) != len(agents) {
				return false
			}
		}
		return true
	}
	require.Eventually(t, together, 15*time.Second, 20*time.Millisecond)

	post := func(verb, arg string) (list []AgentKeys, refused string) {
		resp, err := http.Post("http://"+agents[1].Addresses().Status+"/keys/"+verb+"?all=1", "", strings.NewReader(arg))
		require.NoError(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.NotContains(t, string(b), newKey)
		if resp.StatusCode != http.StatusOK {
			return nil, string(b)
		}
		require.NoError(t, json.Unmarshal(b, &list))
		return list, ""
	}
	each := func(list []AgentKeys, want string) {
		t.Helper()
		require.Len(t, list, len(agents))
		for _, a := range list {
			assert.Empty(t, a.Error, a.Node)
			var text string
			for _, k := range a.Keys {
				text += k.ID
				if k.Sending {
					text += "*"
				}
				text += " "
			}
			assert.Equal(t, want, strings.TrimSpace(text), a.Node)
		}
	}

	_, why := post("remove", oldID)
	assert.Contains(t, why, "the last key cannot be removed")
	require.NoError(t, agents[1].changeKeys("install", newKey))
	_, why = post("remove", oldID)
	assert.Contains(t, why, "reads none of the keys that would stay (it has "+oldID+")", "the others would be cut off")
	list, _ := post("install", newKey)
	require.Len(t, list, 3)
	for _, a := range list {
		assert.Empty(t, a.Error, a.Node)
		assert.Len(t, a.Keys, 2, a.Node)
	}
	list, _ = post("use", newID)
	each(list, newID+"* "+oldID)

	require.Eventually(t, func() bool { list, why = post("remove", oldID); return why == "" }, 10*time.Second, 100*time.Millisecond, "the word of the key goes around in tags")
	each(list, newID+"*")
	for _, r := range agents {
		assert.NotContains(t, r.log.String(), newKey)
	}

	// One whose ring is full refuses, and is named.
	for i := range maxKeys - 1 {
		k, _ := ringKey(byte('c' + i))
		require.NoError(t, agents[2].changeKeys("install", k))
	}
	another, _ := ringKey('z')
	list, _ = post("install", another)
	for _, a := range list {
		if strings.HasPrefix(a.Node, "agent2.") {
			assert.Contains(t, a.Error, "13 keys, at most 12")
		} else {
			assert.Empty(t, a.Error, a.Node)
		}
	}
	assert.True(t, together())
	resp, err := http.Get("http://" + agents[0].Addresses().Status + "/keys?all=1")
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Equal(t, 3, bytes.Count(b, []byte(`"node"`)))
}
