package main

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// An agent leaves no core dump, unless its operator asks for one as one does with Go. Each case is a process of its own.
func TestNoCoreDump(t *testing.T) {
	if os.Getenv("CONFINE_TEST") != "" {
		confine(os.Environ())
		dumpable, _, _ := syscall.RawSyscall(syscall.SYS_PRCTL, 3, 0, 0) // PR_GET_DUMPABLE
		var limit syscall.Rlimit
		require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_CORE, &limit))
		fmt.Printf("dumpable %d, core limit zero: %v\n", dumpable, limit.Max == 0)
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	for env, want := range map[string]string{"GOTRACEBACK=single": "dumpable 0, core limit zero: true", "GOTRACEBACK=crash": "dumpable 1"} {
		c := exec.Command(self, "-test.run", "^TestNoCoreDump$")
		c.Env = append(os.Environ(), "CONFINE_TEST=1", env)
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
		assert.Contains(t, string(out), want, env)
	}
}
