package conventions

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/grapevine-lb/grapevine/agent"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the generated parts of README.md")

// region is the generated part of README.md between its two comments.
func region(t *testing.T, readme, name string) (before, old, after string) {
	t.Helper()
	begin, end := "<!-- generated: "+name+" -->\n", "<!-- end: "+name+" -->"
	before, rest, ok := strings.Cut(readme, begin)
	require.True(t, ok, "README.md has no line %q", begin)
	old, after, ok = strings.Cut(rest, end)
	require.True(t, ok, "README.md has no line %q", end)
	return before + begin, old, end + after
}

// A table that is written by hand is wrong after the second change.
func TestReadmeTables(t *testing.T) {
	const path = "../../README.md"
	for name, want := range map[string]string{"variables": agent.ConfigDocs(), "metrics": agent.MetricsDocs()} {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		before, old, after := region(t, string(b), name)
		if *update && old != want {
			require.NoError(t, os.WriteFile(path, []byte(before+want+after), 0o644))
			continue
		}
		have := strings.Split(old, "\n")
		for i, line := range strings.Split(want, "\n") {
			if i >= len(have) || have[i] != line {
				t.Errorf("%s, line %d is not %q; run: go test ./test/conventions -update", name, i+1, line)
				break
			}
		}
		assert.Equal(t, strings.Count(want, "\n"), strings.Count(old, "\n"), "lines of %s", name)
	}
}

// What README says first is what a newcomer does first.
func TestReadmeOpening(t *testing.T) {
	b, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	opening, _, _ := strings.Cut(string(b), "\n## ")
	assert.Contains(t, opening, "go run ./cmd/grapevine demo")
	assert.Contains(t, opening, "go test ./...")
	assert.Less(t, strings.Count(opening, "\n"), 45, "the opening is one screen")
}
