package chaos

import (
	"flag"
	"testing"

	"github.com/grapevine-lb/grapevine/test/e2e/harness"
)

var long = flag.Bool("long", false, "all scenarios in full, not only the smoke form of two")

func TestMain(m *testing.M) { harness.Main(m, printTable) }

// longOnly skips what the smoke form leaves out.
func longOnly(t *testing.T) {
	t.Helper()
	if !*long {
		t.Skip("runs with -long")
	}
}
