package main

import (
	"encoding/json"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/agent/sim"
)

// The examples of the help text print what the help says.
func TestSimExamples(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("other processors fuse multiplications and additions: the last digits differ")
	}
	_, _, help := run(nil, "sim", "-h")
	examples := regexp.MustCompile(`(?m)^  \$ grapevine (sim .*)\n((?:  .*\n|\n)+)`).FindAllStringSubmatch(help, -1)
	require.Len(t, examples, 2)
	for _, x := range examples {
		code, out, errOut := run(nil, strings.Fields(x[1])...)
		assert.Zero(t, code, errOut)
		indented := regexp.MustCompile(`(?m)^(.)`).ReplaceAllString(out, "  $1")
		assert.Equal(t, strings.TrimSpace(indented), strings.TrimSpace(x[2]), x[1])
	}
}

func TestSimJSON(t *testing.T) {
	code, out, errOut := run(nil, "sim", "--json", "--replicas", "3", "--duration", "10s", "--policy", "auto,round_robin/no-gate",
		"--profile", "10000,20ms,32", "--trace", "../../agent/sim/testdata/azure.csv", "--kill", "4s,6s", "--slow", "2s,3,5s", "--no-ask")
	require.Zero(t, code, errOut)
	var v struct {
		Capacity float64      `json:"capacity"`
		Results  []sim.Result `json:"results"`
	}
	require.NoError(t, json.Unmarshal([]byte(out), &v))
	require.Len(t, v.Results, 2)
	assert.Positive(t, v.Capacity)
	assert.Positive(t, v.Results[0].Counts.Done)
	assert.Zero(t, v.Results[0].Counts.Asked)
	code, out, errOut = run(nil, "sim", "--json", "--rate", "20", "--find-replicas", "--duration", "10s")
	require.Zero(t, code, errOut)
	var f sim.Finding
	require.NoError(t, json.Unmarshal([]byte(out), &f))
	assert.Positive(t, f.Replicas)
	assert.Positive(t, f.Paper.Bare)
}

func TestSimUsage(t *testing.T) {
	for _, row := range []struct{ args, want string }{
		{"--policy best", `unknown policy "best"`},
		{"--find-replicas", "--find-replicas needs --rate"},
		{"--trace nowhere.jsonl", "no such file"},
		{"--profile h200", `unknown profile "h200"`},
		{"--profile 1,2", "prefill tokens/s, decode step, slots"},
		{"--speeds 1,x", "--speeds"},
		{"--kill 5", "--kill"},
		{"--lose-zone 9s,3s", "--lose-zone"},
		{"--slow 5s", "--slow"},
		{"--gate maybe", "--gate"},
		{"--workload x", "no built-in workload"},
	} {
		code, _, errOut := run(nil, append([]string{"sim"}, strings.Fields(row.args)...)...)
		assert.Equal(t, exitUsage, code, row.args)
		assert.Contains(t, errOut, row.want, row.args)
		assert.Equal(t, 1, strings.Count(errOut, "\n"), "one line: %q", errOut)
	}
}
