package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fleet waits until an agent sees n ready replicas, by grapevine status.
func (h *hosts) fleet(host, statusURL string, n int) {
	h.t.Helper()
	h.eventually(fmt.Sprintf("%s to see %d ready replicas", host, n), func() error {
		out, err := h.run(host, nil, "grapevine", "status", "--json", "--url", statusURL)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var s struct{ Peers []struct{ State string } }
		if err := json.Unmarshal([]byte(out), &s); err != nil {
			return err
		}
		ready := 0
		for _, p := range s.Peers {
			if p.State == "ready" {
				ready++
			}
		}
		if ready != n {
			return fmt.Errorf("%d are ready", ready)
		}
		return nil
	})
}

// entry is what the image starts.
func entry(t *testing.T) (args []string) {
	t.Helper()
	b, err := os.ReadFile("../../deploy/docker/Dockerfile")
	require.NoError(t, err)
	for _, name := range []string{"ENTRYPOINT", "CMD"} {
		var list []string
		m := regexp.MustCompile(`(?m)^` + name + ` (\[.*\])$`).FindSubmatch(b)
		require.NotNil(t, m, name)
		require.NoError(t, json.Unmarshal(m[1], &list))
		args = append(args, list...)
	}
	return args
}

// TestComposeRuns: what the compose file starts, started as plain processes on hosts with the services' names, becomes one
// fleet: each service has the environment, command, health check, port and end that the file gives it. The engines are
// simulated ones at the address that the file gives llama-server.
func TestComposeRuns(t *testing.T) {
	model := filepath.Join(t.TempDir(), "model.gguf")
	require.NoError(t, os.WriteFile(model, nil, 0o600))
	key := "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
	o, err := cli.NewProjectOptions([]string{"../../deploy/compose/compose.yaml"}, cli.WithEnv([]string{"GRAPEVINE_GOSSIP_KEY=" + key, "MODEL=" + model}), cli.WithInterpolation(true), cli.WithResolvedPaths(true))
	require.NoError(t, err)
	p, err := o.LoadProject(t.Context())
	require.NoError(t, err)
	var names []string
	for name := range p.Services {
		names = append(names, name)
	}
	slices.Sort(names)
	h := newHosts(t, names...)
	agents := map[string]*process{}
	start := entry(t)
	for _, name := range names {
		s := p.Services[name]
		if strings.HasPrefix(name, "engine") {
			flag := func(f string) string { return s.Command[slices.Index(s.Command, f)+1] }
			h.start(name, nil, "fakeengine", "-dialect", "llamacpp", "-model", "sim", "-listen", flag("--host")+":"+flag("--port"))
			continue
		}
		var env []string
		for k, v := range s.Environment {
			env = append(env, k+"="+*v)
		}
		agents[name] = h.start(name, env, start[0], start[1:]...)
	}
	require.Len(t, agents, 3)
	for name := range agents {
		check := p.Services[name].HealthCheck.Test
		require.Equal(t, "CMD", check[0])
		h.eventually(name+" to be healthy", func() error {
			out, err := h.run(name, nil, check[1], check[2:]...)
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		h.fleet(name, "http://127.0.0.1:8082", len(agents))
		// What the file publishes is there: the clients' port and the page.
		ports := p.Services[name].Ports
		require.Len(t, ports, 2)
		answer, err := h.chat(fmt.Sprintf("http://%s:%d", h.address(name), ports[0].Target))
		require.NoError(t, err, answer)
		assert.Contains(t, answer, "finish_reason")
		out, err := h.run(name, nil, "grapevine", "status", "--url", fmt.Sprintf("http://%s:%d", h.address(name), ports[1].Target))
		assert.NoError(t, err, out)
	}
	for name, a := range agents {
		assert.NoError(t, a.stop(time.Duration(*p.Services[name].StopGracePeriod)), "%s ends in order", name)
	}
}

// unit is what systemd would give the unit's process: environment and command.
func unit(t *testing.T, file, instance, etc, credentials string) (env, command []string) {
	t.Helper()
	b, err := os.ReadFile("../../deploy/systemd/" + file)
	require.NoError(t, err)
	text := strings.NewReplacer("%i", instance, "%d", credentials, "/etc/grapevine", etc).Replace(string(b))
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "Environment":
			env = append(env, value)
		case "EnvironmentFile":
			f, err := os.ReadFile(strings.TrimPrefix(value, "-"))
			require.NoError(t, err)
			for line := range strings.Lines(string(f)) {
				if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
					name, _, _ := strings.Cut(line, "=") // a later file wins
					env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
					env = append(env, line)
				}
			}
		case "ExecStart":
			command = strings.Fields(value)
		case "LoadCredential":
			name, from, _ := strings.Cut(value, ":")
			secret, err := os.ReadFile(from)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(credentials, name), secret, 0o400))
		}
	}
	require.NotEmpty(t, command)
	return env, command
}

// TestUnitsRun: two instances of grapevine@ on one host and the single unit on another, started as plain processes with what
// the units and the files in deploy/systemd say, become one fleet of three.
func TestUnitsRun(t *testing.T) {
	h := newHosts(t, "llm.example.internal", "other")
	etc, credentials := t.TempDir(), t.TempDir()
	key, err := h.run("other", nil, "grapevine", "keygen")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(etc, "gossip.key"), []byte(key), 0o600))
	for _, f := range []string{"grapevine.env", "grapevine-1.env"} {
		b, err := os.ReadFile("../../deploy/systemd/" + f)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(etc, f), b, 0o600))
		if f == "grapevine-1.env" { // what the unit says of the second
			two := strings.NewReplacer("PORT_BASE=8080", "PORT_BASE=8180", "127.0.0.1:8000", "127.0.0.1:8001", "GPU_DEVICES=0", "GPU_DEVICES=1").Replace(string(b))
			require.NoError(t, os.WriteFile(filepath.Join(etc, "grapevine-2.env"), []byte(two), 0o600))
		}
	}
	var agents []*process
	for _, x := range []struct{ host, file, instance, engine string }{
		{"llm.example.internal", "grapevine@.service", "1", "127.0.0.1:8000"},
		{"llm.example.internal", "grapevine@.service", "2", "127.0.0.1:8001"},
		{"other", "grapevine@.service", "1", "127.0.0.1:8000"},
	} {
		h.start(x.host, nil, "fakeengine", "-model", "sim", "-listen", x.engine)
		env, command := unit(t, x.file, x.instance, etc, credentials)
		agents = append(agents, h.start(x.host, append(env, "GRAPEVINE_NODE_NAME="+x.host+"-"+x.instance), command[0], command[1:]...))
	}
	for _, x := range []struct{ host, status, client string }{
		{"llm.example.internal", "127.0.0.1:8082", "8080"}, {"llm.example.internal", "127.0.0.1:8182", "8180"}, {"other", "127.0.0.1:8082", "8080"},
	} {
		h.fleet(x.host, "http://"+x.status, 3)
		answer, err := h.chat("http://" + h.address(x.host) + ":" + x.client)
		require.NoError(t, err, answer)
		assert.Contains(t, answer, "finish_reason")
	}
	for _, a := range agents {
		assert.NoError(t, a.stop(30*time.Second))
	}

	// The unit for one engine on a host, alone.
	env, command := unit(t, "grapevine.service", "", etc, credentials)
	h.start("other", append(env, "GRAPEVINE_JOIN="), command[0], command[1:]...)
	h.fleet("other", "http://127.0.0.1:8082", 1)
}
