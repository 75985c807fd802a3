package gossip

import (
	"bytes"
	"encoding/base64"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseKeys(t *testing.T) {
	a, b := bytes.Repeat([]byte{0xFB}, 32), bytes.Repeat([]byte{2}, 16)
	std, url := base64.StdEncoding.EncodeToString(a), base64.URLEncoding.EncodeToString(a)
	for in, want := range map[string][][]byte{
		"":               nil,
		" \n":            nil,
		std:              {a},
		url:              {a},
		std[:len(std)-1]: {a},
		std + "," + base64.StdEncoding.EncodeToString(b):                               {a, b},
		"\n" + base64.StdEncoding.EncodeToString(b) + "\r\n" + std + "\n" + url + "\n": {b, a},
	} {
		got, err := ParseKeys(in)
		require.NoError(t, err, in)
		assert.Equal(t, want, got, in)
	}
	for in, want := range map[string]string{
		"!!!":             "key 1: not base64 (`grapevine keygen` prints a good one)",
		std + ",c2hvcnQ=": "key 2: has 5 bytes, want 16, 24 or 32 (`grapevine keygen` prints a good one)",
	} {
		_, err := ParseKeys(in)
		require.EqualError(t, err, want)
	}
}

func TestKeyID(t *testing.T) {
	assert.Len(t, KeyID([]byte("a")), 8)
	assert.NotEqual(t, KeyID([]byte("a")), KeyID([]byte("b")))
}
