package gossiptest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
)

// The tests that answer for a figure of the design (gossip.TestTable lists them) say what they measured by Figure. With
// -update it is also written to gossip/testdata/figures.txt, from which the table takes it: a run of all of them takes
// minutes, and some need root.

// figuresFile is beside the package that the figures are about.
func figuresFile() string {
	_, here, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(filepath.Dir(here)), "testdata", "figures.txt")
}

var figures sync.Mutex

// Update adds up to the flag -update of the test binary; set it before the tests run.
var Update *bool

// Figure notes what the test measured for test number n of the table, once a test.
func Figure(t testing.TB, n int, format string, args ...any) {
	t.Helper()
	text := fmt.Sprintf(format, args...)
	t.Logf("figure %d: %s", n, text)
	if Update == nil || !*Update {
		return
	}
	figures.Lock()
	defer figures.Unlock()
	all, err := Figures()
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(m Measured) bool { return m.N == n && m.Test == t.Name() })
	all = append(all, Measured{n, t.Name(), text, here()})
	slices.SortFunc(all, func(a, b Measured) int { return strings.Compare(a.key(), b.key()) })
	var b strings.Builder
	for _, m := range all {
		fmt.Fprintf(&b, "%d\t%s\t%s\t%s\n", m.N, m.Test, m.Text, m.Where)
	}
	if err := os.WriteFile(figuresFile(), []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Measured is a line of the file of figures.
type Measured struct {
	N     int
	Test  string
	Text  string
	Where string // cores, processor, Go
}

// here is where this process measures.
func here() string {
	model := runtime.GOARCH
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, after, ok := strings.Cut(string(b), "model name\t: "); ok {
			model, _, _ = strings.Cut(after, "\n")
		}
	}
	return fmt.Sprintf("%d × %s, %s", runtime.NumCPU(), model, runtime.Version())
}

func (m Measured) key() string { return fmt.Sprintf("%03d %s", m.N, m.Test) }

// Figures reads the file.
func Figures() ([]Measured, error) {
	b, err := os.ReadFile(figuresFile())
	if err != nil {
		return nil, err
	}
	var all []Measured
	for line := range strings.Lines(string(b)) {
		var m Measured
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 4)
		if len(fields) != 4 {
			return nil, fmt.Errorf("figures: line %q", line)
		}
		if _, err := fmt.Sscan(fields[0], &m.N); err != nil {
			return nil, fmt.Errorf("figures: line %q: %w", line, err)
		}
		m.Test, m.Text, m.Where = fields[1], fields[2], fields[3]
		all = append(all, m)
	}
	return all, nil
}
