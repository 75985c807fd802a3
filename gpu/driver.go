package gpu

import (
	"errors"
	"fmt"
)

// driver is the little of NVML that we use. Handles are those of list. All errors are faults. Real: nvmlDriver.
type driver interface {
	// list tells every visible card and MIG slice, cards in PCI order, each followed by its slices.
	list() ([]unit, error)
	memory(h int) (Memory, error)
	utilization(h int) (float64, error)
	throttle(h int) (uint64, error) // bits as in throttleNames
	ecc(h int) (eccState, error)
	processes(h int) ([]Process, error)
	// watch calls event for each XID until stop is closed, and returns when it is or when it cannot go on.
	watch(handles []int, stop <-chan struct{}, event func(h int, xid uint64)) error
	close()
}

// unit is a card or a slice.
type unit struct {
	handle int
	card   int // index of the card
	slice  int // index of the slice, -1 for a card
	minor  int // of /dev/nvidiaN, -1 = unknown
	uuid   string
	name   string
	slices int // a card's slices; > 0 means that only they can be used
}

type eccState struct {
	uncorrected uint64
	pending     bool // a row or page is to be replaced at the next reset
	failed      bool // rows could not be replaced
}

// fault is a failed NVML call, named without asking NVML: after a failed Init no call is allowed.
type fault int

// NVML's codes that mean something to us.
const (
	faultUninitialized fault = 1
	faultNotSupported  fault = 3
	faultPermission    fault = 4
	faultNotFound      fault = 6
	faultNoDriver      fault = 9
	faultTimeout       fault = 10
	faultNoLibrary     fault = 12
	faultNoFunction    fault = 13
	faultLost          fault = 15
	faultReset         fault = 16
	faultMismatch      fault = 18
	faultUnknown       fault = 999
)

var faultNames = map[fault]string{
	faultUninitialized: "the driver's library is not initialised",
	faultNotSupported:  "not supported by this card",
	faultPermission:    "no permission",
	faultNotFound:      "not found",
	faultNoDriver:      "the driver is not loaded",
	faultTimeout:       "time is over",
	faultNoLibrary:     "no driver library (libnvidia-ml.so.1) on this host",
	faultNoFunction:    "the driver is too old for this call",
	faultLost:          "the card is lost (fell off the bus)",
	faultReset:         "the card needs a reset",
	faultMismatch:      "the driver and its library are of different versions (the driver was updated: restart the container or the host)",
	faultUnknown:       "unknown error of the driver",
}

// Error implements error.
func (f fault) Error() string {
	if s := faultNames[f]; s != "" {
		return s
	}
	return fmt.Sprintf("NVML error %d", int(f))
}

// cardGone reports whether err means that this card serves no more.
func cardGone(err error) bool { return errors.Is(err, faultLost) || errors.Is(err, faultReset) }

// driverGone reports whether err means that no call to NVML makes sense any more.
func driverGone(err error) bool {
	return errors.Is(err, faultUninitialized) || errors.Is(err, faultNoDriver) || errors.Is(err, faultMismatch) || errors.Is(err, faultNoLibrary)
}

// Reasons to run slower, by NVML's bits. Idle and clocks that were set are none.
var throttleNames = []struct {
	bit  uint64
	name string
	hurt bool // worth a warning: heat or power, not the normal power cap
}{
	{0x4, "power_cap", false},
	{0x8, "hw_slowdown", true},
	{0x10, "sync_boost", false},
	{0x20, "sw_thermal", true},
	{0x40, "hw_thermal", true},
	{0x80, "power_brake", true},
}

// XIDs that concern the card. The others (13, 31, 43, 45 and so on) are an application's own doing.
var xidNames = map[uint64]string{
	48: "double-bit ECC error", 63: "row remapping", 64: "row remapping failed", 74: "NVLink error", 79: "card fell off the bus",
	94: "contained memory error", 95: "uncontained memory error", 119: "GSP timeout", 120: "GSP error", 140: "unrecovered ECC error",
}
