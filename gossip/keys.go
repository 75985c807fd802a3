package gossip

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
)

// ParseKeys reads a key ring: base64 keys of 16, 24 or 32 bytes (AES-128, -192, -256), separated by commas or white
// space, newest first. The first key encrypts, every key decrypts. Standard and URL alphabets are taken, with or without
// padding; a repeated key is dropped. An empty text is an empty ring. Errors name the place of the key, never the key.
func ParseKeys(s string) ([][]byte, error) {
	var keys [][]byte
	for i, f := range strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\r' || r == '\t' }) {
		k, err := parseKey(f)
		if err != nil {
			return nil, fmt.Errorf("key %d: %w", i+1, err)
		}
		if !containsKey(keys, k) {
			keys = append(keys, k)
		}
	}
	return keys, nil
}

func parseKey(s string) ([]byte, error) {
	s = strings.TrimRight(strings.NewReplacer("-", "+", "_", "/").Replace(s), "=")
	k, err := base64.RawStdEncoding.DecodeString(s)
	if err != nil {
		return nil, fmt.Errorf("not base64 (`grapevine keygen` prints a good one)")
	}
	switch len(k) {
	case 16, 24, 32:
		return k, nil
	}
	return nil, fmt.Errorf("has %d bytes, want 16, 24 or 32 (`grapevine keygen` prints a good one)", len(k))
}

func containsKey(keys [][]byte, k []byte) bool {
	for _, x := range keys {
		if bytes.Equal(x, k) {
			return true
		}
	}
	return false
}

// KeyID returns a short public name of a key: 8 hex digits of a hash. It can be logged and put into a tag.
func KeyID(key []byte) string {
	h := sha256.New()
	h.Write([]byte("grapevine gossip key id\x00"))
	h.Write(key)
	return hex.EncodeToString(h.Sum(nil)[:4])
}
