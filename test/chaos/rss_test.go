package chaos

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// rssOf is a process's resident memory in KB.
func rssOf(t *testing.T, pid int) (kb int64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			_, err := fmt.Sscan(rest, &kb)
			require.NoError(t, err)
		}
	}
	return kb
}
