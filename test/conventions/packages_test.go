package conventions

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/grapevine-lb/grapevine"

// pkg is what `go list` says about a package of this module.
type pkg struct {
	ImportPath, Name, Doc string
	GoFiles, CgoFiles     []string
	IgnoredGoFiles        []string
	Imports               []string
	Standard              bool
	Incomplete            bool
}

// rel is the import path below the module: "proxy/peertls".
func (p pkg) rel() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

// packages lists the module's packages as a Linux build with cgo sees them.
var packages = sync.OnceValues(func() ([]pkg, error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Name,Doc,GoFiles,CgoFiles,IgnoredGoFiles,Imports", "./...")
	cmd.Dir = "../.."
	cmd.Env = append(cmd.Environ(), "GOOS=linux", "CGO_ENABLED=1")
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return nil, errors.New(string(exit.Stderr))
		}
		return nil, err
	}
	var list []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return list, nil
		case err != nil:
			return nil, err
		}
		list = append(list, p)
	}
})

// arrows says what the code of each package may import besides the standard library. A package that is not listed falls
// under its nearest listed parent. Why:
//
//   - routing is pure, so that the simulator, the demo and every test can run the very code that routes;
//   - proxy, gossip, gpu and the engine reader do not know each other: each is read, tested and replaced alone;
//   - agent is the one place where the parts meet;
//   - nothing of the product needs what lies in test.
var arrows = map[string][]string{
	"routing":                {},
	"gpu":                    {"github.com/NVIDIA/go-nvml"},
	"gossip":                 {"routing", "github.com/hashicorp/serf", "github.com/hashicorp/memberlist", "github.com/hashicorp/go-metrics"},
	"gossip/gossiptest":      {"gossip", "routing", "github.com/hashicorp/memberlist"},
	"proxy":                  {"routing", "proxy/peertls", "proxy/h1", "proxy/link", "proxy/guard", "proxy/span", "golang.org/x/sys"},
	"proxy/link":             {},
	"proxy/guard":            {},
	"proxy/span":             {},
	"proxy/peertls":          {},
	"proxy/h1":               {"proxy"},
	"agent/engine":           {"routing", "github.com/prometheus"},
	"agent/engine/enginesim": {},
	"agent/otlp":             {"proxy/span", "go.opentelemetry.io/proto/slim/otlp", "google.golang.org/protobuf"},
	"agent":                  {"agent/engine", "agent/otlp", "gossip", "gpu", "proxy", "proxy/h1", "proxy/peertls", "proxy/span", "routing", "github.com/caarlos0/env/v11", "github.com/hashicorp/memberlist", "github.com/prometheus"},
	"agent/demo":             {"agent", "agent/engine/enginesim", "gossip", "proxy", "routing"},
	"agent/sim":              {"agent/engine/enginesim", "routing"},
	"cmd/grapevine":          {"agent", "agent/demo", "agent/sim", "gossip", "proxy", "routing", "github.com/caarlos0/env/v11", "golang.org/x/term"},
	"test":                   {"agent", "agent/engine/enginesim", "gossip", "routing", "test", "github.com/stretchr/testify"},
}

func TestArrows(t *testing.T) {
	list, err := packages()
	require.NoError(t, err)
	for _, p := range list {
		rule := p.rel()
		for arrows[rule] == nil && strings.Contains(rule, "/") {
			rule = rule[:strings.LastIndexByte(rule, '/')]
		}
		allowed := arrows[rule]
		if !assert.NotNil(t, allowed, "%s is a new package: say in arrows what it may import", p.rel()) {
			continue
		}
		for _, imp := range p.Imports {
			if imp == "C" || !strings.Contains(strings.Split(imp, "/")[0], ".") {
				continue // standard library
			}
			name := strings.TrimPrefix(imp, module+"/")
			ours := name != imp
			ok := false
			for _, a := range allowed {
				// Packages of ours by their exact name, modules of others with all that is below.
				ok = ok || name == a || (!ours || a == "test") && strings.HasPrefix(name, a+"/")
			}
			assert.True(t, ok, "%s imports %s, which its rule in arrows does not allow", p.rel(), name)
		}
	}
}

// A package that does not say what it is for is read as code only, and grows a second purpose.
func TestPackageDocs(t *testing.T) {
	list, err := packages()
	require.NoError(t, err)
	require.NotEmpty(t, list)
	for _, p := range list {
		if len(p.GoFiles)+len(p.CgoFiles) == 0 {
			continue // tests only
		}
		assert.NotEmpty(t, p.Doc, "%s has no package comment", p.rel())
		if p.Name != "main" {
			assert.True(t, strings.HasPrefix(p.Doc, "Package "+p.Name+" "), "%s: its comment is to begin with \"Package %s\"", p.rel(), p.Name)
		}
	}
}

// Who embeds the agent gets all that go.mod requires: each direct requirement is here with its reason, and heavy things that
// only tests need live in modules of their own below test.
var requirements = map[string]string{
	"github.com/NVIDIA/go-nvml":           "GPU memory; the only binding NVIDIA maintains",
	"github.com/caarlos0/env/v11":         "configuration from struct tags, without dependencies of its own",
	"github.com/hashicorp/memberlist":     "membership and the transport of load records, below serf",
	"github.com/hashicorp/serf":           "membership with tags and graceful leave",
	"github.com/hashicorp/go-metrics":     "the sink that serf and memberlist demand",
	"github.com/prometheus/client_model":  "the types that prometheus/common reads into",
	"github.com/prometheus/common":        "reads and writes the metrics format",
	"github.com/stretchr/testify":         "tests only",
	"go.opentelemetry.io/proto/slim/otlp": "the messages of OTLP, generated by OpenTelemetry itself, without gRPC",
	"google.golang.org/protobuf":          "writes them; prometheus/common brings it anyway",
	"golang.org/x/sys":                    "filter and queue of a listening socket, which syscall does not have; the Go team's, and in the graph anyway",
	"golang.org/x/term":                   "raw mode and size of a terminal, for grapevine top",
}

func TestDirectRequirements(t *testing.T) {
	cmd := exec.Command("go", "mod", "edit", "-json")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	require.NoError(t, err)
	var mod struct {
		Module  struct{ Path string }
		Require []struct {
			Path     string
			Indirect bool
		}
		Replace []any
	}
	require.NoError(t, json.Unmarshal(out, &mod))
	assert.Equal(t, module, mod.Module.Path)
	assert.Empty(t, mod.Replace, "a replacement does not reach those who embed")
	for _, r := range mod.Require {
		if !r.Indirect {
			assert.NotEmpty(t, requirements[r.Path], "%s is a new direct requirement: give its reason in requirements", r.Path)
		}
	}
	list, err := packages()
	require.NoError(t, err)
	for _, p := range list {
		for _, imp := range p.Imports {
			if imp == "C" || strings.HasPrefix(imp, module) || !strings.Contains(strings.Split(imp, "/")[0], ".") {
				continue
			}
			reason := ""
			for path, why := range requirements {
				if imp == path || strings.HasPrefix(imp, path+"/") {
					reason = why
				}
			}
			assert.NotEmpty(t, reason, "%s imports %s, which is not in requirements", p.rel(), imp)
			assert.False(t, reason == "tests only" && !strings.HasPrefix(p.rel(), "test/"), "%s imports %s outside of tests", p.rel(), imp)
		}
	}
}
