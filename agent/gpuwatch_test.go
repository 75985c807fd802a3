package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/grapevine-lb/grapevine/gpu"
	"github.com/grapevine-lb/grapevine/routing"
)

// fakeGPU is a driver whose next reading a test sets.
type fakeGPU struct {
	mu      sync.Mutex
	reading gpu.Reading
	err     error
	closed  bool
}

func (f *fakeGPU) set(r gpu.Reading, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reading, f.err = r, err
}

func (f *fakeGPU) Read() (gpu.Reading, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reading, f.err
}

func (f *fakeGPU) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return nil
}

func cards(trouble ...string) gpu.Reading {
	d := gpu.Device{Index: 1, UUID: "GPU-1", Name: "H100", Memory: gpu.Memory{Used: 60 << 30, Total: 80 << 30}, Utilization: new(0.5),
		Throttle: []string{"hw_thermal"}, ECC: new(uint64(2)), Processes: []gpu.Process{{PID: 7}, {PID: 8}}, Foreign: new(1), Trouble: trouble}
	r := gpu.Reading{At: time.Now(), Devices: []gpu.Device{d}, Memory: d.Memory, Method: "GRAPEVINE_GPU_DEVICES"}
	for _, t := range trouble {
		r.Trouble = append(r.Trouble, "GPU 1: "+t)
	}
	return r
}

// startWithGPU is start, with the fake in the driver's place.
func startWithGPU(t *testing.T, cfg Config, f *fakeGPU) *runner {
	t.Helper()
	r := &runner{t: t, log: &lockedBuffer{}, done: make(chan error, 1)}
	a, err := New(cfg, Options{Logger: slog.New(slog.NewTextHandler(r.log, nil))})
	require.NoError(t, err)
	a.openGPU = func(gpu.Config) (gpuReader, error) { return f, nil }
	r.Agent = a
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.done <- a.Run(ctx) }()
	t.Cleanup(func() { r.stop() })
	<-a.Listening()
	return r
}

// Trouble of a card takes the replica out of its peers' picks while its engine still answers: before a request fails.
func TestGPUTroubleEjectsBeforeRequestsFail(t *testing.T) {
	var f fakeGPU
	f.set(cards(), nil)
	e := startSim(t, fast())
	sick := startWithGPU(t, loopbackConfig(e.url()), &f)
	sick.untilReady()
	cfg := loopbackConfig(startSim(t, fast()).url())
	cfg.Join = []string{sick.Addresses().Gossip}
	other := start(t, cfg, Options{})
	other.untilReady()
	seen := func() PeerStatus {
		for _, p := range other.Status().Peers {
			if !p.Self {
				return p
			}
		}
		return PeerStatus{}
	}
	other.eventually(5*time.Second, "the sick replica ready", func() bool { return seen().State == "ready" })

	f.set(cards("XID 79 (card fell off the bus)"), nil)
	other.eventually(5*time.Second, "trouble seen by the other agent", func() bool {
		return seen().State == "suspect" && strings.Contains(strings.Join(seen().Flags, ","), "GPU trouble")
	})
	before := e.server.Stats().Submitted
	for i := range 20 {
		code, body := other.chat(fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"question %d"}],"max_tokens":2}`, i))
		require.Equal(t, 200, code, body)
	}
	assert.Equal(t, before, e.server.Stats().Submitted, "requests went to the replica with a sick card")
	s := sick.Status()
	assert.Equal(t, []string{"GPU 1: XID 79 (card fell off the bus)"}, s.GPU.Trouble)
	assert.Contains(t, strings.Join(s.Warnings, "\n"), "XID 79")
	_, page := sick.get("/metrics")
	assert.Contains(t, page, "grapevine_gpu_trouble 1\n")

	f.set(cards(), nil)
	other.eventually(5*time.Second, "the trouble over", func() bool { return seen().State == "ready" })
}

func TestGPUStatusAndMetrics(t *testing.T) {
	var f fakeGPU
	f.set(cards(), nil)
	r := startWithGPU(t, loopbackConfig(startSim(t, fast()).url()), &f)
	r.eventually(5*time.Second, "a reading", func() bool { return len(r.Status().GPU.Cards) == 1 })
	c := r.Status().GPU.Cards[0]
	assert.Equal(t, CardStatus{Index: 1, UUID: "GPU-1", Name: "H100", MemoryUsed: routing.Some(uint64(60 << 30)), MemoryTotal: routing.Some(uint64(80 << 30)),
		Utilization: routing.Some(0.5), Throttle: []string{"hw_thermal"}, ECCErrors: routing.Some(uint64(2)), Processes: routing.Some(2), Others: routing.Some(1),
		Trouble: []string{}}, c)
	_, page := r.get("/metrics")
	for _, want := range []string{
		"grapevine_gpu_trouble 0\n", `grapevine_gpu_utilization_ratio{gpu="1"} 0.5`, `grapevine_gpu_throttled{gpu="1",reason="hw_thermal"} 1`,
		`grapevine_gpu_ecc_errors_total{gpu="1"} 2`, `grapevine_gpu_processes{gpu="1"} 2`, `grapevine_gpu_other_processes{gpu="1"} 1`,
	} {
		assert.Contains(t, page, want)
	}

	// The driver vanishes after hours, or its library no longer matches: unknown with the reason, and no fault of the replica.
	f.set(gpu.Reading{}, fmt.Errorf("%w: the driver and its library are of different versions", gpu.ErrUnavailable))
	r.eventually(5*time.Second, "the reason", func() bool { return strings.Contains(r.Status().GPU.Why, "different versions") })
	s := r.Status()
	assert.False(t, s.GPU.MemoryUsed.OK)
	assert.Empty(t, s.GPU.Cards)
	_, page = r.get("/metrics")
	assert.NotContains(t, page, "grapevine_gpu_utilization_ratio{", "unknown is not zero")
	assert.NotContains(t, page, "\ngrapevine_gpu_trouble ")
	r.untilReady()

	f.set(gpu.Reading{}, &gpu.Ambiguous{Cards: 8, Why: "set GRAPEVINE_GPU_DEVICES"})
	r.eventually(5*time.Second, "the warning", func() bool {
		return strings.Contains(strings.Join(r.Status().Warnings, "\n"), "cannot tell which of 8 cards is ours")
	})
	f.set(gpu.Reading{}, errors.New("the GPU driver does not answer"))
	r.eventually(5*time.Second, "the other reason", func() bool { return r.Status().GPU.Why == "the GPU driver does not answer" })
}

// The ways to our cards are asked in their order, and the engine's process only if the engine is on this host.
func TestGPUFinders(t *testing.T) {
	methods := func(engine string) (out []string) {
		cfg := loopbackConfig(engine)
		a, err := New(cfg, Options{})
		require.NoError(t, err)
		for _, f := range gpuConfig(&a.cfg).Finders {
			out = append(out, f.Method)
		}
		return out
	}
	kubelet := []string{"a ResourceClaim shared with the engine's container", "the kubelet's pod resources"}
	process := append(append([]string{}, kubelet...), "device files held open by the engine's process")
	assert.Equal(t, process, methods("http://127.0.0.1:8000"))
	assert.Equal(t, process, methods("http://localhost"))
	assert.Equal(t, process, methods("http://[::1]:9"))
	assert.Equal(t, process, methods("unix:///run/engine.sock"))
	assert.Equal(t, kubelet, methods("http://10.1.2.3:8000"))

	cfg, err := ConfigFromEnv([]string{"GRAPEVINE_INSECURE=true", "POD_NAMESPACE=ns", "POD_NAME=p-0", "CONTAINER_NAME=grapevine", "CUDA_VISIBLE_DEVICES=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID"})
	require.NoError(t, err)
	a, err := New(cfg, Options{})
	require.NoError(t, err)
	assert.Equal(t, []string{"CUDA_VISIBLE_DEVICES=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID"}, gpuConfig(&a.cfg).Env)
	assert.Equal(t, "ns", a.cfg.pod.namespace)
	assert.Equal(t, "p-0", a.cfg.pod.name)
	assert.Equal(t, "grapevine", a.cfg.pod.container)
}
