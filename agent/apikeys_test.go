package agent

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/proxy"
)

func keyLine(key, more string) string {
	return fmt.Sprintf("sha256:%x %s\n", sha256.Sum256([]byte(key)), more)
}

func TestParseAPIKeys(t *testing.T) {
	keys, err := parseAPIKeys("# team keys\n\n" + keyLine("one", "class=1 name=team-a # paid") + keyLine("two", ""))
	require.NoError(t, err)
	assert.Equal(t, proxy.Access{Tenant: "team-a", Class: 1}, keys[sha256.Sum256([]byte("one"))])
	two := keys[sha256.Sum256([]byte("two"))]
	assert.Zero(t, two.Class)
	assert.Regexp(t, "^key-[0-9a-f]{12}$", two.Tenant)
	for text, want := range map[string]string{
		"": "no key", "sk-plain": "line 1", "sha256:12": "line 1", "\n" + keyLine("a", "class=9"): "line 2", keyLine("a", "name=a/b"): "line 1",
		keyLine("a", "admin"): "line 1",
	} {
		_, err := parseAPIKeys(text)
		require.ErrorContains(t, err, want)
		assert.NotContains(t, err.Error(), "plain", "what stands in the file may be a key")
	}
}

// Clients need a key of the file, which is read again; wrong ones are counted and logged once in a while, never with the key.
func TestAPIKeys(t *testing.T) {
	t.Parallel()
	engine := httptest.NewServer(http.NotFoundHandler())
	defer engine.Close()
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(keyLine("first", "")), 0o600))
	cfg := loopbackConfig(engine.URL)
	cfg.APIKeysFile = file
	r := start(t, cfg, Options{})
	try := func(key string) int {
		req, _ := http.NewRequest("GET", "http://"+r.Addresses().Client+"/v1/models", nil)
		if key != "" {
			req.Header.Set("Authorization", "Bearer "+key)
		}
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		if resp.StatusCode == 401 {
			assert.Contains(t, string(b), "invalid_api_key")
		}
		return resp.StatusCode
	}
	assert.NotEqual(t, 401, try("first"))
	assert.Equal(t, 401, try(""))
	for i := range 200 {
		assert.Equal(t, 401, try(fmt.Sprintf("guess-%d", i)))
	}
	assert.Equal(t, 1, strings.Count(r.log.String(), MsgBadAPIKey), "one line, whatever a stranger does")
	assert.NotContains(t, r.log.String(), "guess-")
	assert.EqualValues(t, 201, r.proxy.Metrics().Refusals["unauthorized"])

	require.NoError(t, os.WriteFile(file, []byte(keyLine("second", "class=1")), 0o600))
	require.Eventually(t, func() bool { return try("second") != 401 }, 10*time.Second, 50*time.Millisecond)
	assert.Equal(t, 401, try("first"))
	require.NoError(t, os.WriteFile(file, []byte("half a li"), 0o600))
	require.Eventually(t, func() bool { return strings.Contains(r.log.String(), MsgAPIKeyFile) }, 10*time.Second, 50*time.Millisecond)
	assert.NotEqual(t, 401, try("second"), "the keys stay")
	assert.NotContains(t, r.log.String(), "half a li")

	cfg.APIKeysFile = filepath.Join(t.TempDir(), "none")
	_, err := New(cfg, Options{})
	require.ErrorContains(t, err, "API_KEYS_FILE")
}
