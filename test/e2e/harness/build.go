package harness

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// binaries are built once per test binary, on first use.
var binaries struct {
	sync.Mutex
	dir  string
	path map[string]string
}

// Build compiles a main package of this module and returns the binary's path. With E2E_RACE=1 it has the race detector.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	b := &binaries
	b.Lock()
	defer b.Unlock()
	if path := b.path[pkg]; path != "" {
		return path
	}
	if b.dir == "" {
		dir, err := os.MkdirTemp("", "grapevine-e2e-") //nolint:usetesting // outlives the test that builds first
		if err != nil {
			t.Fatal(err)
		}
		b.dir, b.path = dir, map[string]string{}
	}
	path := filepath.Join(b.dir, filepath.Base(pkg))
	args := []string{"build", "-o", path}
	if os.Getenv("E2E_RACE") == "1" {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = Root(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build %s: %v\n%s", pkg, err, out)
	}
	b.path[pkg] = path
	return path
}

// Main is the TestMain of a suite: it runs the tests and the functions that are to follow them, and tidies up.
func Main(m *testing.M, after ...func()) {
	flag.Parse()
	code := m.Run()
	for _, f := range after {
		f()
	}
	RemoveBinaries()
	os.Exit(code)
}

// RemoveBinaries deletes what Build made; for TestMain, after the tests.
func RemoveBinaries() {
	if binaries.dir != "" {
		os.RemoveAll(binaries.dir)
	}
}

// Root is the directory of the product's go.mod.
func Root(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(strings.TrimSpace(string(out)))
}

// CacheDir is where the test tools that take long to install are kept, outside the clone.
func CacheDir() string {
	base := os.Getenv("XDG_CACHE_HOME")
	if base == "" {
		base = filepath.Join(os.Getenv("HOME"), ".cache")
	}
	return filepath.Join(base, "grapevine")
}
