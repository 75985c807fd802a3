package gpu

import (
	"slices"
	"sync"
)

// fakeDriver is a driver written by hand: its fields are what it answers.
type fakeDriver struct {
	mu      sync.Mutex
	units   []unit
	err     error // of every call
	mem     map[int]Memory
	memErr  map[int]error
	util    float64
	utilErr error
	bits    uint64
	state   eccState
	eccErr  error
	procs   []Process
	procErr error
	events  chan [2]uint64 // handle, xid
	hang    chan struct{}  // calls wait for it
	calls   int
	closed  bool
}

func (f *fakeDriver) call() error {
	f.mu.Lock()
	f.calls++
	hang, err := f.hang, f.err
	f.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return err
}

func (f *fakeDriver) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

func (f *fakeDriver) set(change func(f *fakeDriver)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeDriver) list() ([]unit, error) {
	if err := f.call(); err != nil {
		return nil, err
	}
	return f.units, nil
}

func (f *fakeDriver) memory(h int) (Memory, error) {
	if err := f.call(); err != nil {
		return Memory{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mem[h], f.memErr[h]
}

func (f *fakeDriver) utilization(int) (float64, error) {
	if err := f.call(); err != nil {
		return 0, err
	}
	return f.util, f.utilErr
}

func (f *fakeDriver) throttle(int) (uint64, error) {
	if err := f.call(); err != nil {
		return 0, err
	}
	return f.bits, nil
}

func (f *fakeDriver) ecc(int) (eccState, error) {
	if err := f.call(); err != nil {
		return eccState{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state, f.eccErr
}

func (f *fakeDriver) processes(int) ([]Process, error) {
	if err := f.call(); err != nil {
		return nil, err
	}
	return f.procs, f.procErr
}

func (f *fakeDriver) watch(handles []int, stop <-chan struct{}, event func(int, uint64)) error {
	for {
		select {
		case <-stop:
			return nil
		case e := <-f.events:
			if slices.Contains(handles, int(e[0])) {
				event(int(e[0]), e[1])
			}
		}
	}
}

func (f *fakeDriver) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
}

// cards makes n like cards with 80 GiB each, of which a tenth is used.
func cards(n int) *fakeDriver {
	f := &fakeDriver{mem: map[int]Memory{}, memErr: map[int]error{}, events: make(chan [2]uint64)}
	for i := range n {
		f.units = append(f.units, unit{handle: i, card: i, slice: -1, minor: i, uuid: "GPU-" + string(rune('a'+i)) + "0000000", name: "NVIDIA H100"})
		f.mem[i] = Memory{Used: 8 << 30, Total: 80 << 30}
	}
	return f
}

// sliced makes one card with n MIG slices behind plain cards.
func sliced(plain, n int) *fakeDriver {
	f := cards(plain + 1)
	f.units[plain].slices = n
	for i := range n {
		h := 100 + i
		f.units = append(f.units, unit{handle: h, card: plain, slice: i, minor: plain, uuid: "MIG-" + string(rune('a'+i)) + "0000000", name: "NVIDIA H100 MIG 1g.10gb"})
		f.mem[h] = Memory{Used: 1 << 30, Total: 10 << 30}
	}
	return f
}
