package engine

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden readings anew")

// goldens are the captured states: which file answers which path.
var goldens = map[string]struct {
	kind  Kind
	pages map[string]string
}{
	"vllm-0.32.0/idle":  {VLLM, map[string]string{"/metrics": "vllm-0.32.0/metrics-idle.txt"}},
	"vllm-0.32.0/busy":  {VLLM, map[string]string{"/metrics": "vllm-0.32.0/metrics-busy.txt"}},
	"vllm-0.32.0/after": {VLLM, map[string]string{"/metrics": "vllm-0.32.0/metrics-after.txt"}},

	"vllm-0.8.5-v0/idle":  {VLLM, map[string]string{"/metrics": "vllm-0.8.5-v0/metrics-idle.txt"}},
	"vllm-0.8.5-v0/busy":  {VLLM, map[string]string{"/metrics": "vllm-0.8.5-v0/metrics-busy.txt"}},
	"vllm-0.8.5-v0/after": {VLLM, map[string]string{"/metrics": "vllm-0.8.5-v0/metrics-after.txt"}},

	"llm-d-sim-eec055a/idle":   {VLLM, map[string]string{"/metrics": "llm-d-sim-eec055a/metrics-idle.txt"}},
	"llm-d-sim-eec055a/busy":   {VLLM, map[string]string{"/metrics": "llm-d-sim-eec055a/metrics-busy.txt"}},
	"llm-d-sim-eec055a/after":  {VLLM, map[string]string{"/metrics": "llm-d-sim-eec055a/metrics-after.txt"}},
	"llm-d-sim-eec055a/kvfull": {VLLM, map[string]string{"/metrics": "llm-d-sim-eec055a/metrics-kvfull.txt"}},

	"llamacpp-b11434/idle":       {LlamaCpp, map[string]string{"/metrics": "llamacpp-b11434/metrics-idle.txt", "/slots": "llamacpp-b11434/get_slots.txt", "/props": "llamacpp-b11434/get_props.txt"}},
	"llamacpp-b11434/busy":       {LlamaCpp, map[string]string{"/metrics": "llamacpp-b11434/metrics-busy.txt", "/slots": "llamacpp-b11434/load-busy.txt"}},
	"llamacpp-b11434/after":      {LlamaCpp, map[string]string{"/metrics": "llamacpp-b11434/metrics-after.txt"}},
	"llamacpp-b11434/slots-only": {LlamaCpp, map[string]string{"/slots": "llamacpp-b11434/load-busy.txt"}},

	"sglang-0.5.23-constructed/idle":       {SGLang, map[string]string{"/metrics": "sglang-0.5.23-constructed/metrics-idle.txt"}},
	"sglang-0.5.23-constructed/busy":       {SGLang, map[string]string{"/metrics": "sglang-0.5.23-constructed/metrics-busy.txt"}},
	"sglang-0.5.23-constructed/loads":      {SGLang, map[string]string{"/v1/loads": "sglang-0.5.23-constructed/loads.json"}},
	"sglang-0.5.23-constructed/both-pages": {SGLang, map[string]string{"/v1/loads": "sglang-0.5.23-constructed/loads.json", "/metrics": "sglang-0.5.23-constructed/metrics-busy.txt"}},

	"tgi-3.3.7-constructed/fresh": {TGI, map[string]string{"/metrics": "tgi-3.3.7-constructed/metrics-idle-fresh.txt"}},
	"tgi-3.3.7-constructed/busy":  {TGI, map[string]string{"/metrics": "tgi-3.3.7-constructed/metrics-busy.txt"}},

	"trtllm-serve-constructed/fresh":           {TRTLLM, map[string]string{"/prometheus/metrics": "trtllm-serve-constructed/metrics-fresh.txt"}},
	"trtllm-serve-constructed/busy":            {TRTLLM, map[string]string{"/prometheus/metrics": "trtllm-serve-constructed/metrics-busy.txt"}},
	"trtllm-serve-constructed/iteration-stats": {TRTLLM, map[string]string{"/metrics": "trtllm-serve-constructed/iteration-stats.json"}},

	"triton-trtllm-constructed/busy":   {Triton, map[string]string{"/metrics": "triton-trtllm-constructed/metrics-busy.txt"}},
	"lmdeploy-0.18.0-constructed/idle": {LMDeploy, map[string]string{"/metrics": "lmdeploy-0.18.0-constructed/metrics-idle.txt"}},
	"lmdeploy-0.18.0-constructed/busy": {LMDeploy, map[string]string{"/metrics": "lmdeploy-0.18.0-constructed/metrics-busy.txt"}},
	"nim-constructed/busy":             {NIM, map[string]string{"/v1/metrics": "nim-constructed/metrics-busy.txt"}},
	"infinity-0.0.78/idle":             {Infinity, map[string]string{"/v1/models": "infinity-0.0.78/get_v1_models.txt", "/metrics": "infinity-0.0.78/metrics-idle.txt"}},
	"infinity-0.0.78/after":            {Infinity, map[string]string{"/metrics": "infinity-0.0.78/metrics-after.txt"}},
	"tei-constructed/busy":             {TEI, map[string]string{"/metrics": "tei-constructed/metrics-busy.txt"}},
	"ollama-constructed/loaded":        {Ollama, map[string]string{"/api/ps": "ollama-constructed/api-ps.json"}},
}

// goldenField is one field of a golden reading.
type goldenField struct {
	Value  *float64 `json:"value"`
	Page   string   `json:"page,omitempty"`
	Metric string   `json:"metric,omitempty"`
	Why    string   `json:"why,omitempty"`
}

// printed is the golden form of a reading.
func printed(t *testing.T, rd *Reading, err error) []byte {
	out := map[string]any{}
	if err != nil {
		out["error"] = err.Error()
	}
	for _, s := range rd.Fields() {
		g := goldenField{Page: s.Page, Metric: s.Metric, Why: s.Why}
		if s.Value.OK {
			g.Value = &s.Value.V
		}
		assert.Equal(t, s.Value.OK, s.Why == "", "%s: known and why must not agree", s.Field)
		out[s.Field.String()] = g
	}
	if rd.Adapters.Known {
		out["adapters"] = rd.Adapters
	}
	b, err := json.MarshalIndent(out, "", "  ")
	require.NoError(t, err)
	return append(b, '\n')
}

func TestGoldenReadings(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(goldens)) {
		t.Run(name, func(t *testing.T) {
			g := goldens[name]
			pages := map[string]page{}
			for path, file := range g.pages {
				pages[path] = captured(t, "pages/"+file)
			}
			f := newFake(t, pages)
			r := f.reader(t, g.kind)
			rd, err := r.Read(t.Context())
			compare(t, filepath.Join("testdata", "golden", name+".json"), printed(t, &rd, err))
		})
	}
}

func compare(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run go test -update once")
	assert.Equal(t, string(want), string(got))
}

// Every captured metrics page must have a golden reading, so that none is added without one.
func TestGoldenReadingsCoverEveryPage(t *testing.T) {
	used := map[string]bool{}
	for _, g := range goldens {
		for _, file := range g.pages {
			used[file] = true
		}
	}
	for _, pattern := range []string{"*/metrics-*.txt", "*/*.json"} {
		files, err := filepath.Glob(filepath.Join("testdata/pages", pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, f := range files {
			assert.True(t, used[strings.TrimPrefix(f, "testdata/pages/")], f)
		}
	}
}

// The twin: on every captured page that expfmt accepts, both ways give the same numbers.
func TestScannerAgreesWithExpfmt(t *testing.T) {
	checked := 0
	for _, g := range goldens {
		for _, file := range g.pages {
			p := captured(t, "pages/"+file)
			if !bytes.Contains(p.body, []byte("# TYPE")) {
				continue
			}
			ours, twin, err := bothWays(tableOf(g.kind), p.body)
			require.NoError(t, err, file)
			assert.Equal(t, twin, ours, file)
			checked++
		}
	}
	assert.Greater(t, checked, 20)
}

// bothWays evaluates a page by the scanner and by expfmt, which may refuse it.
func bothWays(table *Table, body []byte) (ours, twin []result, err error) {
	r := &Reader{}
	st := r.newState(table)
	evaluate := func(p *pageState) []result {
		var out []result
		for _, i := range p.entries {
			out = append(out, st.compiled[i].evaluate(p.scanner.wants))
		}
		return out
	}
	p := st.page(mainPage)
	if p == nil {
		return nil, nil, nil
	}
	p.scanner.scan(body)
	ours = evaluate(p)
	err = p.scanner.scanExpfmt(body)
	return ours, evaluate(p), err
}
