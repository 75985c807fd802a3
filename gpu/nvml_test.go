//go:build linux && cgo

package gpu

import (
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxb200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// complete sets what the mock servers leave unset, since an unset function panics.
// What is sent to the channel is the next event of whoever waits.
func complete(s *server.Server) chan<- nvml.EventData {
	events := make(chan nvml.EventData)
	set := &mock.EventSet{
		FreeFunc: func() nvml.Return { return nvml.SUCCESS },
		WaitFunc: func(uint32) (nvml.EventData, nvml.Return) {
			select {
			case e := <-events:
				return e, nvml.SUCCESS
			case <-time.After(5 * time.Millisecond):
				return nvml.EventData{}, nvml.ERROR_TIMEOUT
			}
		},
	}
	s.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return set, nvml.SUCCESS }
	for i, d := range s.Devices {
		d := d.(*server.Device)
		d.MemoryInfo.Used = uint64(i+1) << 30
		d.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{Gpu: 42}, nvml.SUCCESS }
		d.GetCurrentClocksThrottleReasonsFunc = func() (uint64, nvml.Return) { return nvml.ClocksThrottleReasonGpuIdle, nvml.SUCCESS }
		d.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 0, nvml.SUCCESS }
		d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 0, true, false, nvml.SUCCESS }
		d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
			return []nvml.ProcessInfo{{Pid: 1, UsedGpuMemory: ^uint64(0)}}, nvml.SUCCESS
		}
		d.RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS }
		d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	}
	return events
}

func openMock(t *testing.T, s *server.Server, cfg Config) *Reader {
	t.Helper()
	r, err := open(cfg, func() (driver, error) { return startNVML(s) })
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func TestMockServers(t *testing.T) {
	for name, s := range map[string]*server.Server{"A100": dgxa100.New(), "H100": dgxh100.New(), "H200": dgxh200.New(), "B200": dgxb200.New()} {
		complete(s)
		total := s.Devices[3].(*server.Device).MemoryInfo.Total
		require.NotZero(t, total)

		_, err := openMock(t, s, Config{}).Read()
		require.ErrorContains(t, err, "cannot tell which of 8 cards is ours", name)

		got, err := openMock(t, s, Config{Devices: "3"}).Read()
		require.NoError(t, err)
		require.Len(t, got.Devices, 1)
		d := got.Devices[0]
		assert.Contains(t, d.Name, name)
		assert.Equal(t, 3, d.Index)
		assert.Equal(t, Memory{Used: 4 << 30, Total: total}, got.Memory, name)
		assert.Equal(t, new(0.42), d.Utilization)
		assert.Equal(t, new(uint64(0)), d.ECC)
		assert.Equal(t, []Process{{PID: 1}}, d.Processes, "memory that is not told is unknown")
		assert.Equal(t, []string{"GPU 3 replaces memory at its next reset"}, got.Warnings)

		uuid := s.Devices[5].(*server.Device).UUID
		got, err = openMock(t, s, Config{Env: []string{"CUDA_VISIBLE_DEVICES=" + uuid}}).Read()
		require.NoError(t, err)
		assert.Equal(t, 5, got.Devices[0].Index)

		got, err = openMock(t, s, Config{Devices: "all"}).Read()
		require.NoError(t, err)
		assert.Len(t, got.Devices, 8)
		assert.Equal(t, Memory{Used: 36 << 30, Total: 8 * total}, got.Memory)
	}
}

func TestC71MockMIG(t *testing.T) {
	s := dgxh100.New()
	events := complete(s)
	card := s.Devices[2].(*server.Device)
	_, ret := card.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	require.Equal(t, nvml.SUCCESS, ret)
	slice := &mock.Device{
		GetUUIDFunc:                         func() (string, nvml.Return) { return "MIG-1234", nvml.SUCCESS },
		GetNameFunc:                         func() (string, nvml.Return) { return "", nvml.ERROR_NOT_SUPPORTED },
		GetMemoryInfoFunc:                   func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 10 << 30, Used: 3 << 30}, nvml.SUCCESS },
		GetUtilizationRatesFunc:             func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{}, nvml.ERROR_NOT_SUPPORTED },
		GetCurrentClocksThrottleReasonsFunc: func() (uint64, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED },
		GetTotalEccErrorsFunc: func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
			return 0, nvml.ERROR_NOT_SUPPORTED
		},
		GetComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS },
	}
	card.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if i != 4 { // with gaps
			return nil, nvml.ERROR_NOT_FOUND
		}
		return slice, nvml.SUCCESS
	}
	card.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_NO_PERMISSION }

	for _, devices := range []string{"MIG-1234", "2:4", "2"} {
		r := openMock(t, s, Config{Devices: devices})
		got, err := r.Read()
		require.NoError(t, err)
		require.NoError(t, r.Close())
		require.Len(t, got.Devices, 1)
		d := got.Devices[0]
		assert.True(t, d.MIG)
		assert.Equal(t, "MIG-1234", d.UUID)
		assert.Contains(t, d.Name, "H100")
		assert.Equal(t, Memory{Used: 3 << 30, Total: 10 << 30}, got.Memory)
		assert.Nil(t, d.Utilization, "slices have none")
	}
	_, err := openMock(t, s, Config{}).Read()
	require.ErrorContains(t, err, "cannot tell which of 8 cards", "seven cards and one slice")

	// In a container with one slice only its card is seen, and the slice is ours.
	s.DeviceGetCountFunc = func() (int, nvml.Return) { return 1, nvml.SUCCESS }
	s.DeviceGetHandleByIndexFunc = func(int) (nvml.Device, nvml.Return) { return card, nvml.SUCCESS }
	r := openMock(t, s, Config{})
	got, err := r.Read()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	assert.Equal(t, "MIG-1234", got.Devices[0].UUID)
	assert.Equal(t, "the only visible card", got.Method)

	// An XID of the card is one of its slices.
	r = openMock(t, s, Config{})
	_, err = r.Read()
	require.NoError(t, err)
	events <- nvml.EventData{Device: card, EventType: nvml.EventTypeXidCriticalError, EventData: 48}
	require.Eventually(t, func() bool {
		got, err := r.Read()
		return err == nil && len(got.Trouble) == 1
	}, 5*time.Second, 5*time.Millisecond)
	got, _ = r.Read()
	assert.Equal(t, []string{"GPU 0 slice 4: XID 48 (double-bit ECC error)"}, got.Trouble)
}

// After a failed Init nothing else is called: the mock panics at anything that is not set.
func TestFailedInitIsTheLastCall(t *testing.T) {
	for _, ret := range []nvml.Return{nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_LIB_RM_VERSION_MISMATCH, nvml.ERROR_UNKNOWN} {
		inits := 0
		lib := &mock.Interface{InitFunc: func() nvml.Return { inits++; return ret }}
		_, err := open(Config{}, func() (driver, error) { return startNVML(lib) })
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorIs(t, err, fault(ret))
		assert.Equal(t, 1, inits)
	}
}

func TestFaultsAreNVMLs(t *testing.T) {
	for f, ret := range map[fault]nvml.Return{
		faultUninitialized: nvml.ERROR_UNINITIALIZED, faultNotSupported: nvml.ERROR_NOT_SUPPORTED, faultPermission: nvml.ERROR_NO_PERMISSION,
		faultNotFound: nvml.ERROR_NOT_FOUND, faultNoDriver: nvml.ERROR_DRIVER_NOT_LOADED, faultTimeout: nvml.ERROR_TIMEOUT,
		faultNoLibrary: nvml.ERROR_LIBRARY_NOT_FOUND, faultNoFunction: nvml.ERROR_FUNCTION_NOT_FOUND, faultLost: nvml.ERROR_GPU_IS_LOST,
		faultReset: nvml.ERROR_RESET_REQUIRED, faultMismatch: nvml.ERROR_LIB_RM_VERSION_MISMATCH, faultUnknown: nvml.ERROR_UNKNOWN,
	} {
		assert.Equal(t, f, fault(ret))
	}
	bits := map[string]uint64{"power_cap": nvml.ClocksThrottleReasonSwPowerCap, "hw_slowdown": nvml.ClocksThrottleReasonHwSlowdown,
		"sync_boost": nvml.ClocksThrottleReasonSyncBoost, "sw_thermal": nvml.ClocksThrottleReasonSwThermalSlowdown,
		"hw_thermal": nvml.ClocksThrottleReasonHwThermalSlowdown, "power_brake": nvml.ClocksThrottleReasonHwPowerBrakeSlowdown}
	for _, n := range throttleNames {
		assert.Equal(t, bits[n.name], n.bit, n.name)
	}
}
