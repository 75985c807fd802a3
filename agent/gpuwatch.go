package agent

import (
	"context"

	"github.com/grapevine-lb/grapevine/routing"
)

// gpuReading is what the GPU reader will say; until it is there the memory is unknown.
type gpuReading struct {
	Memory  struct{ Used, Total uint64 } // bytes
	Method  string
	Trouble []string
	Devices []struct{ UUID, Name string }
}

// watchGPU notes that the memory of the engine's cards is unknown.
func (a *Agent) watchGPU(context.Context) error {
	const why = "no GPU reader in this build"
	a.own.mu.Lock()
	a.own.gpuWhy = why
	a.own.mu.Unlock()
	a.log.Info(MsgNoGPU, KeyReason, why)
	return nil
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
