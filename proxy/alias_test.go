package proxy

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestReplaceModel(t *testing.T) {
	for in, want := range map[string]string{
		`{"model":"a","x": [1, {"model":"a"}]}`: `{"model":"b/\"c","x": [1, {"model":"a"}]}`,
		`{ "x":1e400 ,"model" : "a" }`:          `{ "x":1e400 ,"model" : "b/\"c" }`,
		`{"model":"z","model":"a"}`:             `{"model":"z","model":"b/\"c"}`,
		`{"mo\u0064el":"\u0061"}` + "\n":        `{"mo\u0064el":"b/\"c"}` + "\n",
		`{"Model":"a"}`:                         "",
		`{"model":"other"}`:                     "",
		`{"model":null}`:                        "",
		`["model","a"]`:                         "",
		`{"model":"a"`:                          `{"model":"b/\"c"`, // the engine sees what is missing
		`{"model":"a","x":NaN}`:                 "",
		``:                                      "",
	} {
		got, ok := replaceModel([]byte(in), "a", `b/"c`)
		assert.Equal(t, want != "", ok, in)
		if ok {
			assert.Equal(t, want, string(got))
		}
	}
}

func FuzzReplaceModel(f *testing.F) {
	f.Add([]byte(`{"model":"a","messages":[{"role":"user","content":"hi"}]}`))
	f.Add([]byte(`{"x":{"model":"a"},"model":"a"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		out, ok := replaceModel(body, "a", "bb")
		if !ok || !json.Valid(body) {
			return
		}
		var before, after map[string]any
		if json.Unmarshal(body, &before) != nil {
			t.Fatalf("%q was taken for an object", body)
		}
		if err := json.Unmarshal(out, &after); err != nil {
			t.Fatalf("%q became %q: %v", body, out, err)
		}
		if before["model"] == "a" {
			before["model"] = "bb"
		}
		assert.Equal(t, before, after)
	})
}
