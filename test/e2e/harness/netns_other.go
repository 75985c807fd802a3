//go:build !linux

package harness

import "testing"

// Isolated needs network namespaces, which only Linux has.
func Isolated(t *testing.T, _ string) bool {
	t.Skip("network namespaces exist on Linux only")
	return false
}

// Drop is for Isolated.
func Drop(...string) string { return "" }
