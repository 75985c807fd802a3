package hostile

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var caseNumber = regexp.MustCompile(`\bC(\d{2,3})\b|(?:Test|And|_|/)C(\d{2,3})`)

// The cases from the field (testdata/cases.txt: what went wrong for others) and the tests that hold them, as far as a test
// says so in its name, in the comment above it, or in a comment or text within it. The table is testdata/cases.md; it fails
// when a case has lost all of its tests.
func TestCasesCoverage(t *testing.T) {
	text, err := os.ReadFile("testdata/cases.txt")
	require.NoError(t, err)
	tests := caseTests(t, "../..")
	var table strings.Builder
	table.WriteString("| case | what went wrong for others | test |\n|---|---|---|\n")
	var without []string
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	require.Len(t, lines, 111)
	for _, line := range lines {
		id, title, _ := strings.Cut(line, " ")
		names := tests[id]
		if len(names) == 0 {
			without = append(without, id)
		}
		slices.Sort(names)
		fmt.Fprintf(&table, "| %s | %s | %s |\n", id, title, strings.Join(slices.Compact(names), "<br>"))
	}
	t.Logf("%d of %d cases have a test; without: %s", len(lines)-len(without), len(lines), strings.Join(without, " "))
	assert.Empty(t, without)
	if *update {
		require.NoError(t, os.WriteFile("testdata/cases.md", []byte(table.String()), 0o644))
		return
	}
	was, err := os.ReadFile("testdata/cases.md")
	require.NoError(t, err)
	for line := range strings.SplitSeq(string(was), "\n") {
		f := strings.Split(line, " | ")
		if len(f) == 3 && strings.HasPrefix(f[0], "| C") && strings.TrimSuffix(f[2], " |") != "" {
			id := strings.TrimPrefix(f[0], "| ")
			assert.NotContains(t, without, id, "%s had tests (%s) and has none any more", id, f[2])
		}
	}
}

// caseTests finds the tests of each case: package folder and function.
func caseTests(t *testing.T, root string) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(p, "_test.go") || strings.Contains(p, "node_modules") {
			return err
		}
		src, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, p, src, parser.ParseComments)
		if err != nil {
			return nil //nolint:nilerr // the compiler says it better
		}
		dir, _ := filepath.Rel(root, filepath.Dir(p))
		for _, decl := range f.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(fn.Name.Name, "Test") && !strings.HasPrefix(fn.Name.Name, "Fuzz") {
				continue
			}
			begin := fn.Pos()
			if fn.Doc != nil {
				begin = fn.Doc.Pos()
			}
			for _, m := range caseNumber.FindAllStringSubmatch(string(src[set.Position(begin).Offset:set.Position(fn.End()).Offset]), -1) {
				id := "C" + m[1] + m[2]
				out[id] = append(out[id], path.Join(filepath.ToSlash(dir), fn.Name.Name))
			}
		}
		return nil
	})
	require.NoError(t, err)
	return out
}
