package conventions

import (
	"bytes"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// files are the paths of everything that is committed or about to be, below the repository's root.
func files(t *testing.T) (list []string) {
	t.Helper()
	cmd := exec.Command("git", "ls-files", "-co", "--exclude-standard", "-z")
	cmd.Dir = "../.."
	if out, err := cmd.Output(); err == nil {
		for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
			if _, err := os.Lstat(filepath.Join("../..", name)); err == nil { // not one that was just removed
				list = append(list, name)
			}
		}
	} else { // an archive without history
		err := filepath.WalkDir("../..", func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				list = append(list, strings.TrimPrefix(filepath.ToSlash(path), "../../"))
			}
			return err
		})
		require.NoError(t, err)
	}
	require.NotEmpty(t, list)
	return list
}

// The layout is fixed, so that everybody finds everything; a new place needs a decision, not an accident.
func TestTopLevel(t *testing.T) {
	allowed := strings.Fields(`agent cmd deploy gossip gpu proxy routing test
		.ci .github .gitattributes .gitignore .golangci.yml .dockerignore
		CHANGELOG.md CONTRIBUTING.md LICENSE Makefile README.md SECURITY.md go.mod go.sum docs`)
	seen := map[string]bool{}
	for _, f := range files(t) {
		top, _, _ := strings.Cut(f, "/")
		if !seen[top] {
			seen[top] = true
			assert.Contains(t, allowed, top, "not a place for files")
		}
	}
	for _, must := range strings.Fields("README.md LICENSE CHANGELOG.md CONTRIBUTING.md Makefile .golangci.yml .ci go.mod") {
		assert.True(t, seen[must], "%s is missing", must)
	}
}

// text calls f with each committed file that is text.
func text(t *testing.T, f func(name, content string)) {
	t.Helper()
	for _, name := range files(t) {
		b, err := os.ReadFile(filepath.Join("../..", name))
		require.NoError(t, err)
		if !bytes.ContainsRune(b[:min(len(b), 8000)], 0) {
			f(name, string(b))
		}
	}
}

// A path or a host of the machine where something was written works nowhere else, and tells what nobody needs to know.
func TestNoMachinePaths(t *testing.T) {
	// Written so that this file does not match itself.
	machine := regexp.MustCompile(`(^|[^\w.$}/-])/(wor` + `k|roo` + `t|hom` + `e/\w+|User` + `s/\w+)/[\w.]`)
	var hosts []string
	for _, v := range []string{"GOPROXY", "PIP_INDEX_URL", "npm_config_registry"} {
		for entry := range strings.FieldsFuncSeq(os.Getenv(v), func(r rune) bool { return r == ',' || r == '|' }) {
			if u, err := url.Parse(entry); err == nil && u.Host != "" && !strings.HasSuffix(u.Hostname(), "golang.org") &&
				!strings.HasSuffix(u.Hostname(), "pypi.org") && !strings.HasSuffix(u.Hostname(), "npmjs.org") {
				hosts = append(hosts, u.Hostname())
			}
		}
	}
	text(t, func(name, content string) {
		for n, line := range strings.Split(content, "\n") {
			assert.False(t, machine.MatchString(line), "%s:%d names a path of a machine: %.160s", name, n+1, line)
			for _, h := range hosts {
				assert.NotContains(t, line, h, "%s:%d names a host of this machine", name, n+1)
			}
		}
	})
}

// Nothing is published yet: who follows such a line gets nothing, or somebody else's.
func TestNothingToFetch(t *testing.T) {
	fetch := regexp.MustCompile(`(go (get|install)|docker (pull|run)|helm (repo add|install \w+ oci:)|podman pull)\b.*grapevine` + `-lb` +
		`|(ghcr|quay|docker)\.io/` + `grapevine`)
	text(t, func(name, content string) {
		for n, line := range strings.Split(content, "\n") {
			assert.False(t, fetch.MatchString(line), "%s:%d tells people to fetch what is not there: %s", name, n+1, line)
		}
	})
}

// A committed binary or a large recording stays in every clone for ever.
func TestNoLargeFiles(t *testing.T) {
	for _, name := range files(t) {
		info, err := os.Stat(filepath.Join("../..", name))
		require.NoError(t, err)
		assert.Less(t, info.Size(), int64(1<<20), "%s is too large to be committed", name)
	}
}

// The scripts say what they do when somebody opens them, and stop at what they did not expect.
func TestScripts(t *testing.T) {
	text(t, func(name, content string) {
		if !strings.HasPrefix(content, "#!") {
			return
		}
		lines := strings.SplitN(content, "\n", 3)
		require.Greater(t, len(lines), 2, name)
		assert.Regexp(t, `^(# |"""|//)`, lines[1], "%s: the second line is to say what the script is for", name)
		if strings.HasSuffix(lines[0], "bash") {
			assert.Regexp(t, `(?m)^set -e?uo pipefail$`, content, name)
		}
		info, err := os.Stat(filepath.Join("../..", name))
		require.NoError(t, err)
		assert.NotZero(t, info.Mode()&0o100, "%s is not executable", name)
	})
}
