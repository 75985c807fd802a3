package span

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func TestParse(t *testing.T) {
	c, ok := Parse(parent)
	assert.True(t, ok)
	assert.Equal(t, "4bf92f3577b34da6a3ce929d0e0e4736", c.Trace.String())
	assert.Equal(t, "00f067aa0ba902b7", c.Span.String())
	assert.True(t, c.Sampled)
	assert.Equal(t, parent, c.String())
	for in, sampled := range map[string]bool{
		strings.TrimSuffix(parent, "01") + "00":             false,
		strings.TrimSuffix(parent, "01") + "03":             true, // other flags are left alone
		"cc" + parent[2:]:                                   true, // a version to come
		"cc" + parent[2:] + "-what-the-future-will-be-like": true,
	} {
		c, ok := Parse(in)
		assert.True(t, ok, in)
		assert.Equal(t, sampled, c.Sampled, in)
	}
	for _, in := range []string{
		"", "00", parent[1:], parent + "-more", parent + "x", "cc" + parent[2:] + ".x", "ff" + parent[2:], strings.ToUpper(parent),
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01", "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
		strings.Replace(parent, "-", "_", 1), strings.Replace(parent, "4bf9", "4bg9", 1), "0x" + parent[2:], parent[:53] + "0x",
	} {
		c, ok := Parse(in)
		assert.False(t, ok, in)
		assert.Zero(t, c, in)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(parent)
	f.Add("cc" + parent[2:] + "-x")
	f.Fuzz(func(t *testing.T, s string) {
		if c, ok := Parse(s); ok {
			again, ok := Parse(c.String())
			if !ok || again != c {
				t.Errorf("%q becomes %q", s, c)
			}
		}
	})
}

func TestTextIsBounded(t *testing.T) {
	assert.Len(t, Text("k", strings.Repeat("x", 10_000)).Value, maxText)
}
