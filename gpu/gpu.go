package gpu

import (
	"errors"
	"fmt"
	"time"
)

// ErrUnavailable says that there is no NVML in this build or on this host, or that it went away. It comes
// wrapped with the reason.
var ErrUnavailable = errors.New("no GPU readings")

// ErrNone says that the settings give this replica no card (none, void, -1).
var ErrNone = errors.New("no card is assigned to this replica")

// Ambiguous says that several cards are seen and nothing tells which are ours.
type Ambiguous struct {
	Cards int    // cards and MIG slices that are seen
	Why   string // what was tried, or how to help; may be empty
}

// Error implements error.
func (a *Ambiguous) Error() string {
	s := fmt.Sprintf("cannot tell which of %d cards is ours", a.Cards)
	if a.Why != "" {
		s += ": " + a.Why
	}
	return s
}

// Memory is in bytes. Total 0 means unknown.
type Memory struct{ Used, Total uint64 }

// Free is the unused share, 0..1, and whether it is known.
func (m Memory) Free() (float64, bool) {
	if m.Total == 0 {
		return 0, false
	}
	return 1 - float64(min(m.Used, m.Total))/float64(m.Total), true
}

// Process is one that computes on a card. PID is the host's, which may mean nothing in our name space.
type Process struct {
	PID    uint32
	Memory uint64 // bytes; 0 = unknown
}

// Device is a card or a MIG slice that is ours.
type Device struct {
	Index int // of the card, in NVML's order (by PCI address)
	UUID  string
	Name  string
	MIG   bool // a slice of a card

	Memory      Memory
	Utilization *float64  // share of the last second in which the card worked, 0..1; nil = unknown
	Throttle    []string  // why it runs slower than it could: power_cap, hw_slowdown, sw_thermal, hw_thermal, power_brake, sync_boost
	ECC         *uint64   // uncorrected errors since the driver was loaded; nil = unknown
	Processes   []Process // nil = unknown
	Foreign     *int      // processes that are not ours; nil = cannot be told
	Trouble     []string  // why requests will soon fail here
}

// Reading is what all our devices said at one moment.
type Reading struct {
	At       time.Time
	Devices  []Device
	Memory   Memory   // sum over the devices; Total 0 if any device's is unknown
	Fullest  Memory   // of the device with the least free share
	Method   string   // how "ours" was told
	Unknown  string   // why Memory is unknown; empty if it is known
	Unified  bool     // Memory is the host's: the card has none of its own
	Trouble  []string // of all devices, each with its card: the replica should get no more requests
	Warnings []string // worth showing: throttled by heat or power, others on the card, a reset is due
}

// Config says which cards are ours.
type Config struct {
	// Devices is GRAPEVINE_GPU_DEVICES: all, none, or a comma list of indices in NVML's order, of MIG slices
	// as card:slice, and of UUIDs or unique beginnings of them (GPU-..., MIG-...). Empty = find out.
	Devices string
	// Env is our own environment as NAME=value. Looked at are CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and
	// NVIDIA_VISIBLE_DEVICES.
	Env []string
	// Finders are asked in order when neither settings nor a single visible card decide.
	Finders []Finder
	// OwnPID reports whether a process on a card belongs to this replica; nil = cannot be told.
	OwnPID func(pid uint32) bool

	proc string // "/proc" unless a test says otherwise
}

// A Finder is a finer way to tell our cards.
type Finder struct {
	Method string // for Reading.Method
	// Find returns UUIDs (or unique beginnings) of our cards or slices, minor numbers as "/dev/nvidiaN", or
	// "visible:N" for all that are visible if these are N. None, or an error, means that it cannot tell.
	Find func() ([]string, error)
}

const allVisible = "visible:"
