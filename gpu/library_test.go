//go:build linux && cgo

package gpu

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// C68: a file that is named like the library and is none, and a library that lacks what we need, say so and harm nothing. The
// loader looks at LD_LIBRARY_PATH once, so each case is a process of its own: this test again, which then only opens.
func TestC68BadLibraries(t *testing.T) {
	if os.Getenv("GPU_TEST_OPEN") != "" {
		_, err := Open(Config{Devices: "0"})
		require.ErrorIs(t, err, ErrUnavailable)
		t.Log(err)
		return
	}
	empty := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(empty, "libnvidia-ml.so.1"), nil, 0o600))
	dirs := map[string]string{"an empty file": empty}
	if gcc, err := exec.LookPath("gcc"); err == nil {
		source := map[string]string{
			"no symbol at all": "int nothing;",
			"too old a one":    "int nvmlInit(void) { return 0; } int nvmlShutdown(void) { return 0; }",
			"that fails":       "int nvmlInit_v2(void) { return 999; } const char *nvmlErrorString(int r) { return \"unknown\"; } int nvmlShutdown(void) { __builtin_trap(); }",
		}
		for name, c := range source {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, "lib.c"), []byte(c), 0o600))
			out, err := exec.Command(gcc, "-shared", "-fPIC", "-o", filepath.Join(dir, "libnvidia-ml.so.1"), filepath.Join(dir, "lib.c")).CombinedOutput()
			require.NoError(t, err, "%s", out)
			dirs[name] = dir
		}
	}
	self, err := os.Executable()
	require.NoError(t, err)
	for name, dir := range dirs {
		c := exec.Command(self, "-test.run", "^TestC68BadLibraries$", "-test.v")
		c.Env = append(os.Environ(), "GPU_TEST_OPEN=1", "LD_LIBRARY_PATH="+dir)
		out, err := c.CombinedOutput()
		assert.NoError(t, err, "%s: %s", name, out)
	}
}
