package sim

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTraceFormats(t *testing.T) {
	own, err := ReadTraceFile("testdata/own.jsonl.gz")
	require.NoError(t, err)
	assert.Equal(t, "own", own.Name)
	assert.True(t, own.Prefixes)
	require.Len(t, own.Rows, 4)
	r := own.Rows[0]
	assert.Equal(t, []any{349 * time.Millisecond, 2007, 139, 4}, []any{r.At, r.Prompt, r.Output, len(r.Blocks)})
	assert.Equal(t, r.Blocks[:3], own.Rows[2].Blocks[:3], "equal ids are equal prefixes")
	assert.Equal(t, 1, own.Rows[3].Prompt, "nothing counts as one token")

	moon, err := ReadTraceFile("testdata/mooncake.jsonl")
	require.NoError(t, err)
	require.Len(t, moon.Rows, 5)
	r = moon.Rows[1]
	assert.Equal(t, []any{3052 * time.Millisecond, 7319, 490, 15}, []any{r.At, r.Prompt, r.Output, len(r.Blocks)})

	azure, err := ReadTraceFile("testdata/azure.csv")
	require.NoError(t, err)
	require.Len(t, azure.Rows, 5)
	assert.False(t, azure.Prefixes)
	r = azure.Rows[1]
	assert.Equal(t, []any{4.314579, 396, 109}, []any{r.At.Seconds(), r.Prompt, r.Output})

	in, out := azure.Means()
	assert.InDelta(t, (374+396+879+91+91)/5.0, in, 1e-9)
	assert.InDelta(t, (44+109+55+16+16)/5.0, out, 1e-9)
	assert.Len(t, azure.Cap(400).Rows, 4)
}

func TestBadTraces(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "is empty",
		"# only a comment\n":               "no requests",
		"{\"i\":1}":                        "line 1: neither t nor timestamp",
		"{\"t\":1}\n{\"t\":0.5}":           "line 2: arrives before the one before it",
		"{\"t\":-1}":                       "out of range",
		"{\"t\":1,\"i\":-5}":               "out of range",
		"{\"t\":1":                         "line 1: unexpected end",
		"a,b,c\n1,2,3":                     "neither JSON lines nor a header",
		"TIMESTAMP,ContextTokens,G\nx,1,1": "line 2: parsing time",
		"\x1f\x8bnonsense":                 "bad trace",
		"TIMESTAMP,ContextTokens,G\n":      "no requests",
		"TIMESTAMP,ContextTokens,G\n2023-11-16 18:15:46,x,1": "invalid syntax",
	} {
		_, err := ReadTrace("x", strings.NewReader(text))
		assert.ErrorIs(t, err, ErrTrace, text)
		assert.ErrorContains(t, err, want, text)
	}
	_, err := Workload("nonsense")
	assert.ErrorIs(t, err, ErrTrace)
}

func FuzzReadTrace(f *testing.F) {
	f.Add("{\"t\":0.1,\"i\":2007,\"o\":139,\"h\":[24]}\n")
	f.Add("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
	f.Add("{\"timestamp\":27482,\"input_length\":6955,\"output_length\":52,\"hash_ids\":[46,47]}")
	f.Fuzz(func(t *testing.T, s string) {
		x, err := ReadTrace("f", strings.NewReader(s))
		if err != nil {
			return
		}
		require.NotEmpty(t, x.Rows)
		for i, r := range x.Rows {
			require.Positive(t, r.Prompt)
			require.Positive(t, r.Output)
			require.LessOrEqual(t, len(r.Blocks), (r.Prompt+blockTokens-1)/blockTokens)
			require.True(t, i == 0 || r.At >= x.Rows[i-1].At)
		}
	})
}

// gaps returns mean and coefficient of variation of the times between arrivals, and the requests.
func gaps(t *Trace, a Arrivals, rate float64, n int) (mean, cv float64, all []*request) {
	s := newSource(t, a, rate, n, 3)
	last, sum, squares := int64(0), 0.0, 0.0
	for r := new(request); s.next(r); r = new(request) {
		if len(all) > 0 {
			g := float64(r.arrival-last) / 1e9
			sum, squares = sum+g, squares+g*g
		}
		last = r.arrival
		all = append(all, r)
	}
	k := float64(len(all) - 1)
	mean = sum / k
	return mean, math.Sqrt(squares/k-mean*mean) / mean, all
}

func TestArrivals(t *testing.T) {
	chat, err := Workload("chat")
	require.NoError(t, err)
	for _, row := range []struct {
		a  Arrivals
		cv float64
	}{{Arrivals{}, 1}, {Arrivals{Mode: "gamma", CV: 1}, 1}, {Arrivals{Mode: "gamma", CV: 4}, 4}, {Arrivals{Mode: "gamma", CV: 0.5}, 0.5}, {Arrivals{Mode: "trace"}, 0}} {
		mean, cv, all := gaps(chat, row.a, 50, 100_000)
		assert.Len(t, all, 100_000)
		assert.InEpsilon(t, 1/50.0, mean, 0.05, "%+v", row.a)
		assert.InDelta(t, row.cv, cv, 0.05*row.cv+1e-5, "%+v", row.a)
	}
	assert.Error(t, Arrivals{Mode: "gamma"}.validate())
	assert.Error(t, Arrivals{Mode: "x"}.validate())
}

// A run that is longer than its trace interleaves tenants that share nothing, each in the trace's order.
func TestTenants(t *testing.T) {
	own, err := ReadTraceFile("testdata/own.jsonl.gz")
	require.NoError(t, err)
	_, _, all := gaps(own, Arrivals{}, 1, 12)
	require.Len(t, all, 12)
	for tenant := range 3 {
		a, c := all[tenant], all[2*3+tenant]
		assert.Equal(t, a.blocks[:3], c.blocks[:3], "rows 0 and 2 of a tenant share three blocks")
		if tenant > 0 {
			assert.NotEqual(t, all[0].blocks[0], a.blocks[0])
		}
	}
}

func TestWorkloads(t *testing.T) {
	for name, want := range map[string][2]float64{"chat": {1150, 210}, "agents": {8000, 100}} {
		w, err := Workload(name)
		require.NoError(t, err)
		in, out := w.Means()
		assert.InEpsilon(t, want[0], in, 0.25, name)
		assert.InEpsilon(t, want[1], out, 0.25, name)
	}
}
