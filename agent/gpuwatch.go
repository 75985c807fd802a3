package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/gpu"
	"github.com/grapevine-lb/grapevine/routing"
)

const gpuEvery = time.Second

// watchGPU reads the memory of the engine's cards, if there is a driver. Without one it says so once and ends: the rest
// of the agent works the same.
func (a *Agent) watchGPU(ctx context.Context) error {
	r, err := gpu.Open(gpu.Config{Devices: a.cfg.GPUDevices, Env: a.cfg.cudaEnv})
	if err != nil {
		a.gpuUnknown(err)
		return nil
	}
	defer r.Close()
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

// gpuUnknown notes why the memory is unknown, and logs a new reason once. No driver is normal; a card that cannot be read
// or told is a warning.
func (a *Agent) gpuUnknown(err error) {
	a.own.mu.Lock()
	fresh := a.own.gpuWhy != err.Error()
	a.own.gpu, a.own.gpuWhy = gpu.Reading{}, err.Error()
	a.own.mu.Unlock()
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
	for _, d := range o.gpu.Devices {
		s.Devices = append(s.Devices, d.UUID+" "+d.Name)
	}
	return s
}
