package engine

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseMapping(t *testing.T) {
	for text, want := range map[string]Entry{
		"running = my_running": {Field: FieldRunning, Page: mainPage,
			Terms: []Term{{Names: []string{"my_running"}}}},
		"waiting=a:size|b.len": {Field: FieldWaiting, Page: mainPage,
			Terms: []Term{{Names: []string{"a:size", "b.len"}}}},
		`waiting = sum(queue{state!="done", pool="g\"p;u",})`: {Field: FieldWaiting, Page: mainPage,
			Terms: []Term{{Names: []string{"queue"}, Where: []Match{{"state", "done", true}, {"pool", `g"p;u`, false}}}}},
		"kv_usage = used / total": {Field: FieldKVUsed, Page: mainPage,
			Terms: []Term{{Names: []string{"used"}, Fold: Mean}, {Op: Over, Names: []string{"total"}, Fold: Mean}}},
		"kv_usage = percent * 0.01": {Field: FieldKVUsed, Page: mainPage,
			Terms: []Term{{Names: []string{"percent"}, Fold: Mean}, {Op: Times, Const: 0.01}}},
		"running = sum(max by (dp_rank, x) (n))": {Field: FieldRunning, Page: mainPage,
			Terms: []Term{{Names: []string{"n"}, Inner: Max, By: []string{"dp_rank", "x"}}}},
		"kv_capacity_tokens = max(info[blocks]) * 16": {Field: FieldKVCapacity, Page: mainPage,
			Terms: []Term{{Names: []string{"info"}, Fold: Max, Label: "blocks"}, {Op: Times, Const: 16}}},
		"running = sum(/loads/*/running) - /held @ json:/v1/loads?x=1": {Field: FieldRunning, Page: "json:/v1/loads?x=1",
			Terms: []Term{{Names: []string{"/loads/*/running"}}, {Op: Minus, Names: []string{"/held"}}}},
		"waiting = queue @ http://10.0.0.1:9/m": {Field: FieldWaiting, Page: "http://10.0.0.1:9/m",
			Terms: []Term{{Names: []string{"queue"}}}},
		"running = max": {Field: FieldRunning, Page: mainPage, Terms: []Term{{Names: []string{"max"}}}},
	} {
		m, err := ParseMapping(text)
		require.NoError(t, err, text)
		require.Len(t, m.Entries, 1, text)
		assert.Equal(t, want, m.Entries[0], text)
	}
	m, err := ParseMapping("running = a\n\n waiting = b; waiting = /x @ json:/p;")
	require.NoError(t, err)
	assert.Len(t, m.Entries, 3)
	assert.Equal(t, []Page{{Name: mainPage, Paths: []string{"/metrics"}}, {Name: "json:/p", Paths: []string{"/p"}, JSON: true}}, m.Pages)
}

func TestParseMappingErrors(t *testing.T) {
	for text, want := range map[string]string{
		"running":                     `engine metrics: entry 1, "running": want "field = expression"`,
		"a = b":                       `engine metrics: entry 1, "a = b": unknown field "a", want one of running, waiting, run_limit, waiting_tokens, kv_usage, kv_capacity_tokens, asleep, prefix_hits, prefix_queries, prefix_hit_rate, prompt_tokens, generation_tokens, preemptions, first_tokens, process_start, models_loaded`,
		"running = ":                  `engine metrics: entry 1, "running =": want a metric or a number at the end`,
		"running = a; waiting = b +":  `engine metrics: entry 2, "waiting = b +": want a metric or a number at the end`,
		"running = 3":                 `engine metrics: entry 1, "running = 3": no metric in the expression`,
		"running = nan * a":           `engine metrics: entry 1, "running = nan * a": nan is no number to calculate with`,
		"running = a b":               `engine metrics: entry 1, "running = a b": unexpected "b"`,
		"running = sum(a":             `engine metrics: entry 1, "running = sum(a": want ')' at the end`,
		"running = a{x=1}":            `engine metrics: entry 1, "running = a{x=1}": want a value in double quotes before "1}"`,
		"running = a{=\"1\"}":         `engine metrics: entry 1, "running = a{=\"1\"}": want a label before "=\"1\"}"`,
		"running = a @ metrics":       `engine metrics: entry 1, "running = a @ metrics": page "metrics": want /path, json:/path or a whole URL`,
		"running = /a/b":              `engine metrics: entry 1, "running = /a/b": /a/b is a JSON pointer, but the page is Prometheus text: add @ json:/path`,
		"running = a @ json:/p":       `engine metrics: entry 1, "running = a @ json:/p": a is no JSON pointer: on json:/p names start with /`,
		"running = sum(max by x (a))": `engine metrics: entry 1, "running = sum(max by x (a))": want '(' before "x (a))"`,
	} {
		_, err := ParseMapping(text)
		assert.EqualError(t, err, want)
	}
}

// A mapping fills an unknown engine's reading and overrides a known one's.
func TestCustomMapping(t *testing.T) {
	f := newFake(t, map[string]page{
		"/metrics":  text("my_running{pool=\"a\"} 3\nmy_running{pool=\"b\"} 4\nused 30\ntotal 120\nvllm:num_requests_waiting 9\n"),
		"/internal": text(`{"pools":[{"rank":"0","kind":"x","q":5},{"rank":"0","kind":"y","q":4},{"rank":"1","kind":"x","q":1}]}`),
	})
	mapping := `running = my_running{pool!="b"}; kv_usage = used / total; waiting = sum(max by (rank) (/pools/*/q)) @ json:/internal`
	for _, kind := range []Kind{OpenAI, VLLM} {
		r := New(Config{URL: f.url(t), Kind: kind, Mapping: mapping})
		rd, err := r.Read(t.Context())
		require.NoError(t, err)
		assert.Equal(t, 3, rd.Running.V)
		assert.Equal(t, 0.25, rd.KVUsed.V)
		assert.Equal(t, 6, rd.Waiting.V, "5 of rank 0 and 1 of rank 1")
		assert.Equal(t, "/internal", rd.Field(FieldWaiting).Page)
		r.Close()
	}
}

func FuzzParseMapping(f *testing.F) {
	f.Add(`running = sum(max by (dp_rank) (n{a="b"})) / 2 @ json:/x`)
	f.Add(`kv_usage = a|b[label]{x!="\"y"} * 0.01; waiting = c`)
	f.Fuzz(func(t *testing.T, s string) {
		m, err := ParseMapping(s)
		if err != nil {
			assert.NotContains(t, err.Error(), "\n")
			return
		}
		for _, e := range m.Entries {
			require.NotEmpty(t, e.Terms)
		}
	})
}

// The examples of the README are what they say: mappings that parse.
func TestExamplesOfTheREADME(t *testing.T) {
	b, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	examples := regexp.MustCompile(`(?m)^GRAPEVINE_ENGINE_METRICS='(.*)'$`).FindAllStringSubmatch(string(b), -1)
	assert.GreaterOrEqual(t, len(examples), 4)
	for _, e := range examples {
		m, err := ParseMapping(e[1])
		require.NoError(t, err, e[1])
		assert.GreaterOrEqual(t, len(m.Entries), 2, e[1])
	}
	for f := range numFields {
		if f == FieldProcessStart || f == FieldModelsLoaded || f == FieldPrefixHitRate {
			continue // of no use to a mapping that is written by hand
		}
		assert.Contains(t, string(b), "`"+f.String()+"`")
	}
}
