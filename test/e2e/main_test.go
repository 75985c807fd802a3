package e2e

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	long   = flag.Bool("long", false, "run everything, not only the smoke test")
	update = flag.Bool("update", false, "rewrite the golden tables")
)

func TestMain(m *testing.M) { harness.Main(m) }

// longOnly skips a test that takes more than a few seconds; .ci/run has a part with -long.
func longOnly(t *testing.T) {
	t.Helper()
	if !*long {
		t.Skip("runs with -long")
	}
}

// golden compares text with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run with -update")
	assert.Equal(t, string(want), got, "if this is right: run with -update")
}

// fakes starts n simulated engines and returns them with their URLs.
func fakes(s *harness.Stage, n int, args ...string) (engines []*harness.Engine, urls []string) {
	for i := range n {
		engines = append(engines, s.FakeEngine(i+1, args...))
		urls = append(urls, engines[i].URL)
	}
	return engines, urls
}
