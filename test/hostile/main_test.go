package hostile

import (
	"flag"
	"os"
	"testing"
)

var (
	long   = flag.Bool("long", false, "run what takes longer, too")
	update = flag.Bool("update", false, "rewrite the generated files")
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(m.Run())
}
