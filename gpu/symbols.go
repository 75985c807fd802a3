//go:build linux && cgo

package gpu

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const nvmlLibrary = "libnvidia-ml.so.1"

// nvmlSymbols are the functions that we call, in the names that go-nvml falls back to. Calling one that the library lacks
// ends the process ("symbol lookup error"), so a library of a driver that is too old, or of somebody else, is not called.
var nvmlSymbols = []string{"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID",
	"nvmlDeviceGetName", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount",
	"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates",
	"nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows",
	"nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetComputeRunningProcesses", "nvmlEventSetCreate", "nvmlEventSetFree",
	"nvmlEventSetWait", "nvmlDeviceRegisterEvents"}

// lacking names the first function that the host's library does not have; "" if it has all, or if there is no library,
// which Init says better.
func lacking() string {
	lib := dl.New(nvmlLibrary, dl.RTLD_LAZY|dl.RTLD_GLOBAL) // as go-nvml opens it
	if lib.Open() != nil {
		return ""
	}
	defer func() { _ = lib.Close() }()
	for _, name := range nvmlSymbols {
		if lib.Lookup(name) == nil {
			continue
		}
		if lib.Lookup(name+"_v2") == nil || lib.Lookup(name+"_v3") == nil { // go-nvml takes the newest that there is
			continue
		}
		return name
	}
	return ""
}

// openDriver starts the host's library.
func openDriver() (driver, error) {
	if name := lacking(); name != "" {
		return nil, fmt.Errorf("%w: %s has no %s: it is too old, or no driver's", ErrUnavailable, nvmlLibrary, name)
	}
	return startNVML(nvml.New())
}
