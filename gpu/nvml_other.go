//go:build !(linux && cgo)

package gpu

import "fmt"

// openDriver has nothing to open: NVML needs Linux and cgo.
func openDriver() (driver, error) {
	return nil, fmt.Errorf("%w: this build has no NVML (it needs linux and cgo)", ErrUnavailable)
}
