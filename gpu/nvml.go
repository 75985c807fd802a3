//go:build linux && cgo

package gpu

import (
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// nvmlDriver is the real driver behind go-nvml, or one of its mocks.
type nvmlDriver struct {
	lib nvml.Interface

	mu      sync.Mutex
	handles []nvml.Device
	byUUID  map[string]int
	card    map[int]int // handle of a slice → handle of its card
}

// startNVML initialises the library. After a failed Init no call of NVML may follow, not even Shutdown or the
// one that names the error: each kills the process.
func startNVML(lib nvml.Interface) (driver, error) {
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, fault(ret))
	}
	return &nvmlDriver{lib: lib, byUUID: map[string]int{}, card: map[int]int{}}, nil
}

// check makes an error of a code without asking the library.
func check(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fault(ret)
}

// handle keeps d and returns its number, the same again for the same device.
func (n *nvmlDriver) handle(uuid string, d nvml.Device) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if h, ok := n.byUUID[uuid]; ok && uuid != "" {
		n.handles[h] = d
		return h
	}
	n.handles = append(n.handles, d)
	n.byUUID[uuid] = len(n.handles) - 1
	return len(n.handles) - 1
}

func (n *nvmlDriver) device(h int) nvml.Device {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.handles[h]
}

func (n *nvmlDriver) list() ([]unit, error) {
	count, ret := n.lib.DeviceGetCount()
	if err := check(ret); err != nil {
		return nil, err
	}
	var out []unit
	for i := range count {
		d, ret := n.lib.DeviceGetHandleByIndex(i)
		if err := check(ret); err != nil {
			if driverGone(err) {
				return nil, err
			}
			continue // lost, or not for us; the others may still do
		}
		u := unit{card: i, slice: -1, minor: -1}
		u.uuid, _ = d.GetUUID()
		u.name, _ = d.GetName()
		u.handle = n.handle(u.uuid, d)
		if m, ret := d.GetMinorNumber(); ret == nvml.SUCCESS {
			u.minor = m
		}
		slices := n.slices(u, d)
		u.slices = len(slices)
		out = append(append(out, u), slices...)
	}
	return out, nil
}

// slices lists a card's MIG slices.
func (n *nvmlDriver) slices(card unit, d nvml.Device) []unit {
	mode, _, ret := d.GetMigMode()
	if ret != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
		return nil
	}
	most, ret := d.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil
	}
	var out []unit
	for i := range most {
		s, ret := d.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // a gap
		}
		u := unit{card: card.card, slice: i, minor: card.minor}
		u.uuid, _ = s.GetUUID()
		if u.name, ret = s.GetName(); ret != nvml.SUCCESS {
			u.name = card.name + " MIG"
		}
		u.handle = n.handle(u.uuid, s)
		n.mu.Lock()
		n.card[u.handle] = card.handle
		n.mu.Unlock()
		out = append(out, u)
	}
	return out
}

func (n *nvmlDriver) memory(h int) (Memory, error) {
	m, ret := n.device(h).GetMemoryInfo()
	return Memory{Used: m.Used, Total: m.Total}, check(ret)
}

func (n *nvmlDriver) utilization(h int) (float64, error) {
	u, ret := n.device(h).GetUtilizationRates()
	return float64(u.Gpu) / 100, check(ret)
}

func (n *nvmlDriver) throttle(h int) (uint64, error) {
	bits, ret := n.device(h).GetCurrentClocksThrottleReasons() // the older name, which every driver has
	return bits, check(ret)
}

func (n *nvmlDriver) ecc(h int) (eccState, error) {
	d := n.device(h)
	count, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	if err := check(ret); err != nil {
		return eccState{}, err
	}
	s := eccState{uncorrected: count}
	if _, _, pending, failed, ret := d.GetRemappedRows(); ret == nvml.SUCCESS {
		s.pending, s.failed = pending, failed
	} else if p, ret := d.GetRetiredPagesPendingStatus(); ret == nvml.SUCCESS { // before Ampere
		s.pending = p == nvml.FEATURE_ENABLED
	}
	return s, nil
}

func (n *nvmlDriver) processes(h int) ([]Process, error) {
	ps, ret := n.device(h).GetComputeRunningProcesses()
	if err := check(ret); err != nil {
		return nil, err
	}
	out := make([]Process, 0, len(ps))
	for _, p := range ps {
		m := p.UsedGpuMemory
		if m == ^uint64(0) { // not available
			m = 0
		}
		out = append(out, Process{PID: p.Pid, Memory: m})
	}
	return out, nil
}

// watchEvery is how often the wait for events looks up, in milliseconds.
const watchEvery = 1000

func (n *nvmlDriver) watch(handles []int, stop <-chan struct{}, event func(h int, xid uint64)) error {
	set, ret := n.lib.EventSetCreate()
	if err := check(ret); err != nil {
		return err
	}
	defer func() { _ = check(set.Free()) }() // nothing to do about it
	// Events belong to cards, what is ours may be slices of them.
	ours := map[int][]int{}
	n.mu.Lock()
	for _, h := range handles {
		card, slice := n.card[h]
		if !slice {
			card = h
		}
		ours[card] = append(ours[card], h)
	}
	n.mu.Unlock()
	registered := 0
	for card := range ours {
		if n.device(card).RegisterEvents(nvml.EventTypeXidCriticalError, set) == nvml.SUCCESS {
			registered++
		}
	}
	if registered == 0 {
		return faultNotSupported
	}
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		data, ret := set.Wait(watchEvery)
		switch err := check(ret); {
		case ret == nvml.ERROR_TIMEOUT:
		case err != nil:
			return err
		case data.EventType == nvml.EventTypeXidCriticalError:
			hit := handles // a lost card may not tell its name any more: then it is one of ours
			if uuid, ret := data.Device.GetUUID(); ret == nvml.SUCCESS {
				n.mu.Lock()
				hit = ours[n.byUUID[uuid]]
				n.mu.Unlock()
			}
			for _, h := range hit {
				event(h, data.EventData)
			}
		}
	}
}

func (n *nvmlDriver) close() { _ = check(n.lib.Shutdown()) } // nothing follows it
