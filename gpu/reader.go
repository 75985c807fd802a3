package gpu

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
)

const (
	// answerWithin bounds each wait for the driver. Init takes seconds without persistence mode.
	answerWithin = 3 * time.Second
	initWithin   = 15 * time.Second
	// troubleFor is how long an XID or a new ECC error counts as trouble: marks end by the clock.
	troubleFor = 10 * time.Minute
	// askAgain is how long "cannot be told" holds: finders walk through /proc.
	askAgain = 10 * time.Second
)

// Reader reads our devices again and again.
type Reader struct {
	cfg  Config
	drv  driver
	stop chan struct{} // ends the watch for events

	mu     sync.Mutex
	busy   chan struct{} // closed when the sample under way is done; nil = none
	last   Reading
	err    error
	closed bool
	gone   error // the driver went away: it is never called again
	ours   []unit
	method string
	unsure error          // why ours are not known
	asked  time.Time      // when that was
	eccAt  map[int]uint64 // uncorrected errors when last looked
	events map[int]event  // by card: the last of its troubles

	watching sync.WaitGroup
}

// event is a mark on a card that ends by the clock.
type event struct {
	at   time.Time
	what string
}

// Open starts NVML and finds our devices. Without NVML it returns ErrUnavailable with the reason. That it
// cannot be told which cards are ours is no failure of Open: Read says so, and asks the finders again.
func Open(cfg Config) (*Reader, error) { return open(cfg, openDriver) }

func open(cfg Config, openDriver func() (driver, error)) (*Reader, error) {
	if err := CheckDevices(cfg.Devices); err != nil {
		return nil, fmt.Errorf("GRAPEVINE_GPU_DEVICES: %w", err)
	}
	if cfg.proc == "" {
		cfg.proc = "/proc"
	}
	type result struct {
		drv driver
		err error
	}
	done := make(chan result, 1)
	go func() {
		d, err := openDriver()
		done <- result{d, err}
	}()
	timer := time.NewTimer(initWithin)
	defer timer.Stop()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, r.err
		}
		return &Reader{cfg: cfg, drv: r.drv, stop: make(chan struct{}), eccAt: map[int]uint64{}, events: map[int]event{}}, nil
	case <-timer.C:
		go func() { // the driver may come back one day; nobody waits for it then
			if r := <-done; r.err == nil {
				r.drv.close()
			}
		}()
		return nil, fmt.Errorf("%w: the driver does not answer", ErrUnavailable)
	}
}

// Read samples our devices, which takes about a millisecond. The error is Ambiguous, ErrNone or ErrUnavailable
// (wrapped), or says that the driver does not answer. A device that fails alone is in Reading.Trouble.
func (r *Reader) Read() (Reading, error) {
	r.mu.Lock()
	if r.closed || r.gone != nil {
		err := r.gone
		r.mu.Unlock()
		if err == nil {
			err = fmt.Errorf("%w: reader closed", ErrUnavailable)
		}
		return Reading{}, err
	}
	busy := r.busy
	if busy == nil {
		busy = make(chan struct{})
		r.busy = busy
		go r.sample(busy)
	}
	r.mu.Unlock()
	timer := time.NewTimer(answerWithin)
	defer timer.Stop()
	select {
	case <-busy:
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.last, r.err
	case <-timer.C:
		return Reading{}, errors.New("the GPU driver does not answer")
	}
}

// Close ends the reading. It waits for the driver, but not for long.
func (r *Reader) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	close(r.stop)
	busy := r.busy
	r.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		if busy != nil {
			<-busy
		}
		r.watching.Wait()
		r.mu.Lock()
		gone := r.gone
		r.mu.Unlock()
		if gone == nil {
			r.drv.close()
		}
		close(idle)
	}()
	timer := time.NewTimer(answerWithin)
	defer timer.Stop()
	select {
	case <-idle:
		return nil
	case <-timer.C:
		return errors.New("close GPU readings: the driver does not answer")
	}
}

// sample asks the driver once. Only one runs at a time.
func (r *Reader) sample(done chan struct{}) {
	reading, err := r.ask()
	r.mu.Lock()
	defer r.mu.Unlock()
	if driverGone(err) {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
		r.gone = err
	}
	r.last, r.err, r.busy = reading, err, nil
	close(done)
}

func (r *Reader) ask() (Reading, error) {
	if r.ours == nil {
		if r.unsure != nil && time.Since(r.asked) < askAgain {
			return Reading{}, r.unsure
		}
		all, err := r.drv.list()
		if err != nil {
			return Reading{}, err
		}
		ours, method, err := choose(all, r.cfg)
		if err != nil {
			r.unsure, r.asked = err, time.Now()
			return Reading{}, err
		}
		r.ours, r.method = ours, method
		r.watch()
	}
	out := Reading{At: time.Now(), Method: r.method}
	for _, u := range r.ours {
		d, err := r.device(u, &out)
		if err != nil {
			return Reading{}, err
		}
		out.Devices = append(out.Devices, d)
	}
	r.sum(&out)
	return out, nil
}

// device asks for one of ours. The error is only for a driver that is gone.
func (r *Reader) device(u unit, out *Reading) (Device, error) {
	d := Device{Index: u.card, UUID: u.uuid, Name: u.name, MIG: u.slice >= 0}
	label := fmt.Sprintf("GPU %d", u.card)
	if d.MIG {
		label = fmt.Sprintf("GPU %d slice %d", u.card, u.slice)
	}
	var gone error
	// ok sorts a call's outcome: what is only not told leaves the field unknown.
	ok := func(err error) bool {
		switch {
		case err == nil:
			return true
		case driverGone(err):
			gone = err
		case cardGone(err) && len(d.Trouble) == 0:
			d.Trouble = append(d.Trouble, err.Error())
		}
		return false
	}
	m, err := r.drv.memory(u.handle)
	switch {
	case ok(err) && m.Total > 0:
		d.Memory = m
	case err == nil:
		out.Unknown = label + ": the driver tells no total"
	case unified(u.name) && errors.Is(err, faultNotSupported):
		if d.Memory, err = hostMemory(r.cfg.proc); err != nil {
			out.Unknown = label + ": " + err.Error()
		} else {
			out.Unified = true
		}
	default:
		out.Unknown = label + ": memory: " + err.Error()
	}
	if v, err := r.drv.utilization(u.handle); ok(err) {
		d.Utilization = new(v)
	}
	if bits, err := r.drv.throttle(u.handle); ok(err) {
		for _, t := range throttleNames {
			if bits&t.bit != 0 {
				d.Throttle = append(d.Throttle, t.name)
				if t.hurt {
					out.Warnings = append(out.Warnings, label+" is throttled: "+t.name)
				}
			}
		}
	}
	if e, err := r.drv.ecc(u.handle); ok(err) {
		d.ECC = new(e.uncorrected)
		r.mu.Lock()
		before, seen := r.eccAt[u.handle]
		r.eccAt[u.handle] = e.uncorrected
		if seen && e.uncorrected > before {
			r.events[u.handle] = event{time.Now(), fmt.Sprintf("%d new uncorrected memory errors", e.uncorrected-before)}
		}
		r.mu.Unlock()
		if e.failed {
			d.Trouble = append(d.Trouble, "bad memory rows could not be replaced")
		}
		if e.pending {
			out.Warnings = append(out.Warnings, label+" replaces memory at its next reset")
		}
	}
	if ps, err := r.drv.processes(u.handle); ok(err) {
		d.Processes = ps
		if own := r.cfg.OwnPID; own != nil {
			n := 0
			for _, p := range ps {
				if !own(p.PID) {
					n++
				}
			}
			// The driver counts in the host's process name space. If none is ours, we are in another, and cannot tell.
			if n < len(ps) || n == 0 {
				d.Foreign = new(n)
			}
			if n > 0 && n < len(ps) {
				out.Warnings = append(out.Warnings, fmt.Sprintf("%s is used by %d other processes", label, n))
			}
		}
	}
	r.mu.Lock()
	for h, e := range r.events {
		if time.Since(e.at) > troubleFor {
			delete(r.events, h)
		} else if h == u.handle {
			d.Trouble = append(d.Trouble, e.what)
		}
	}
	r.mu.Unlock()
	for _, t := range d.Trouble {
		out.Trouble = append(out.Trouble, label+": "+t)
	}
	return d, gone
}

// sum adds up the memory. One unknown device makes the sum unknown; slices share nothing, unified memory is
// counted once.
func (r *Reader) sum(out *Reading) {
	least := 2.0
	for _, d := range out.Devices {
		free, ok := d.Memory.Free()
		if !ok {
			out.Memory, out.Fullest = Memory{}, Memory{}
			return
		}
		if free < least {
			least, out.Fullest = free, d.Memory
		}
		if out.Unified {
			out.Memory = d.Memory
			continue
		}
		out.Memory.Used += d.Memory.Used
		out.Memory.Total += d.Memory.Total
	}
}

// watch waits for XIDs in a goroutine of its own, locked to a thread as NVML asks for.
func (r *Reader) watch() {
	var handles []int
	for _, u := range r.ours {
		handles = append(handles, u.handle)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.watching.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_ = r.drv.watch(handles, r.stop, r.xid) // without events, the readings still tell most
	})
}

// xid notes an event of the driver.
func (r *Reader) xid(h int, xid uint64) {
	name, ok := xidNames[xid]
	if !ok {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events[h] = event{time.Now(), fmt.Sprintf("XID %d (%s)", xid, name)}
}
