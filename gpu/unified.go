package gpu

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// unified reports whether a card shares the host's memory, so that NVML tells none of its own.
func unified(name string) bool {
	for _, s := range []string{"GB10", "Orin", "Thor", "Xavier", "Jetson", "Tegra"} {
		if strings.Contains(name, s) {
			return true
		}
	}
	return false
}

// hostMemory reads the host's memory, where "used" is all that is not available.
func hostMemory(proc string) (Memory, error) {
	b, err := os.ReadFile(filepath.Join(proc, "meminfo"))
	if err != nil {
		return Memory{}, err
	}
	var total, available uint64
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kib, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			continue
		}
		switch f[0] {
		case "MemTotal:":
			total = kib << 10
		case "MemAvailable:":
			available = kib << 10
		}
	}
	if total == 0 || available == 0 {
		return Memory{}, fmt.Errorf("meminfo tells no memory")
	}
	return Memory{Used: total - min(available, total), Total: total}, nil
}
