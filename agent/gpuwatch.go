package agent

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/gpu"
	"github.com/grapevine-lb/grapevine/routing"
)

const gpuEvery = time.Second

// watchGPU reads the memory of the engine's cards, if there is a driver. Without one it says so once and ends: the rest
// of the agent works the same.
func (a *Agent) watchGPU(ctx context.Context) error {
	r, err := a.openGPU(gpuConfig(&a.cfg))
	if err != nil {
		a.gpuUnknown(err)
		return nil
	}
	defer func() { _ = r.Close() }() // it was only read from
	tick := time.NewTicker(gpuEvery)
	defer tick.Stop()
	for {
		reading, err := r.Read()
		if err != nil {
			a.gpuUnknown(err)
		} else {
			a.stateChange(func(o *own) {
				o.gpu, o.gpuWhy = reading, reading.Unknown
				o.facts.gpuBad = len(reading.Trouble) > 0
			})
			a.gpuKnown(reading)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// gpuReader is a gpu.Reader, or a test's.
type gpuReader interface {
	Read() (gpu.Reading, error)
	Close() error
}

func openGPU(c gpu.Config) (gpuReader, error) { return gpu.Open(c) }

// gpuConfig is how the engine's cards are found: settings first, then who can tell.
func gpuConfig(cfg *Config) gpu.Config {
	c := gpu.Config{Devices: cfg.GPUDevices, Env: cfg.cudaEnv}
	port, socket := 0, ""
	switch u := cfg.engineURL(); {
	case u.Scheme == "unix":
		socket = u.Path
	case isLoopback(u.Host): // an engine on another host holds no card of ours
		port = 80
		if u.Scheme == "https" {
			port = 443
		}
		if p, err := strconv.Atoi(u.Port()); err == nil {
			port = p
		}
	}
	pod := cfg.pod
	c.Finders = []gpu.Finder{
		gpu.SharedClaim(gpu.KubeletSocket, pod.namespace, pod.name, pod.container),
		gpu.PodDevices(gpu.KubeletSocket, pod.namespace, pod.name),
	}
	if port != 0 || socket != "" {
		c.Finders = append(c.Finders, gpu.EngineFiles(port, socket))
		c.OwnPID = gpu.EngineProcesses(port, socket)
	}
	return c
}

// gpuUnknown notes why the memory is unknown, and logs a new reason once. No driver is normal; a card that cannot be read
// or told is a warning.
func (a *Agent) gpuUnknown(err error) {
	a.own.mu.Lock()
	fresh := a.own.gpuWhy != err.Error()
	a.own.mu.Unlock()
	a.stateChange(func(o *own) {
		o.gpu, o.gpuWhy = gpu.Reading{}, err.Error()
		o.facts.gpuBad = false // a driver that is gone says nothing more; the engine's own health does
	})
	if !fresh {
		return
	}
	if errors.Is(err, gpu.ErrUnavailable) || errors.Is(err, gpu.ErrNone) {
		a.log.Info(MsgNoGPU, KeyReason, err.Error())
		return
	}
	a.warn("gpu", MsgNoGPU+": "+err.Error())
	a.log.Warn(MsgNoGPU, KeyReason, err.Error(), KeyHint, "set "+Prefix+"GPU_DEVICES")
}

// gpuKnown shows what a reading warns of, and logs it when it changes.
func (a *Agent) gpuKnown(r gpu.Reading) {
	text := strings.Join(slices.Concat(r.Trouble, r.Warnings), "; ")
	if text == "" {
		a.clear("gpu")
		return
	}
	if a.warn("gpu", "GPU: "+text) {
		a.log.Warn(MsgGPU, KeyReason, text)
	}
}

// gpuStatus is called with the lock of own held.
func (o *own) gpuStatus() GPUStatus {
	s := GPUStatus{Why: o.gpuWhy, Method: o.gpu.Method, Trouble: append([]string{}, o.gpu.Trouble...), Devices: []string{}}
	if o.gpuWhy == "" && o.gpu.Memory.Total > 0 {
		s.MemoryUsed, s.MemoryTotal = routing.Some(o.gpu.Memory.Used), routing.Some(o.gpu.Memory.Total)
	} else if o.gpuWhy == "" {
		s.Why = "not read yet"
	}
	s.Warnings, s.Unified, s.Cards = append([]string{}, o.gpu.Warnings...), o.gpu.Unified, []CardStatus{}
	for _, d := range o.gpu.Devices {
		s.Devices = append(s.Devices, d.UUID+" "+d.Name)
		s.Cards = append(s.Cards, cardStatus(&d))
	}
	return s
}

func cardStatus(d *gpu.Device) CardStatus {
	c := CardStatus{Index: d.Index, UUID: d.UUID, Name: d.Name, MIG: d.MIG, Throttle: append([]string{}, d.Throttle...), Trouble: append([]string{}, d.Trouble...)}
	if d.Memory.Total > 0 {
		c.MemoryUsed, c.MemoryTotal = routing.Some(d.Memory.Used), routing.Some(d.Memory.Total)
	}
	if d.Utilization != nil {
		c.Utilization = routing.Some(*d.Utilization)
	}
	if d.ECC != nil {
		c.ECCErrors = routing.Some(*d.ECC)
	}
	if d.Processes != nil {
		c.Processes = routing.Some(len(d.Processes))
	}
	if d.Foreign != nil {
		c.Others = routing.Some(*d.Foreign)
	}
	return c
}

// collectGPU adds the metrics of the cards. Slices of one card are told apart by their order.
func collectGPU(g *gathering, s *GPUStatus) {
	if s.Method == "" {
		return // no card is known: no number is better than zero
	}
	g.add(MetricGPUTrouble, bit(len(s.Trouble) > 0))
	seen := map[int]int{} // slices by card
	for _, c := range s.Cards {
		label := strconv.Itoa(c.Index)
		if c.MIG {
			label += ":" + strconv.Itoa(seen[c.Index])
			seen[c.Index]++
		}
		if c.Utilization.OK {
			g.add(MetricGPUUtilization, c.Utilization.V, label)
		}
		for _, reason := range c.Throttle {
			g.add(MetricGPUThrottled, 1, label, reason)
		}
		if c.ECCErrors.OK {
			g.add(MetricGPUECC, float64(c.ECCErrors.V), label)
		}
		addInt(g, MetricGPUProcesses, c.Processes, label)
		addInt(g, MetricGPUOthers, c.Others, label)
	}
}
