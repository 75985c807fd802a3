package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func openFake(t *testing.T, f *fakeDriver, cfg Config) *Reader {
	t.Helper()
	r, err := open(cfg, func() (driver, error) { return f, nil })
	require.NoError(t, err)
	return r
}

func TestReadSumsOurDevices(t *testing.T) {
	f := cards(4)
	f.mem[2] = Memory{Used: 79 << 30, Total: 80 << 30}
	f.util = 0.5
	f.procs = []Process{{PID: 7, Memory: 5}}
	r := openFake(t, f, Config{Devices: "1,2"})
	got, err := r.Read()
	require.NoError(t, err)
	assert.Equal(t, Memory{Used: 87 << 30, Total: 160 << 30}, got.Memory)
	assert.Equal(t, f.mem[2], got.Fullest)
	assert.Equal(t, "GRAPEVINE_GPU_DEVICES", got.Method)
	require.Len(t, got.Devices, 2)
	d := got.Devices[0]
	assert.Equal(t, Device{Index: 1, UUID: "GPU-b0000000", Name: "NVIDIA H100", Memory: f.mem[1], Utilization: new(0.5), ECC: new(uint64(0)), Processes: f.procs}, d)
	assert.Empty(t, got.Trouble)
	assert.Empty(t, got.Warnings)
	assert.Empty(t, got.Unknown)
	require.NoError(t, r.Close())
	assert.True(t, f.closed)
	calls := f.calls
	_, err = r.Read()
	require.ErrorIs(t, err, ErrUnavailable)
	assert.Equal(t, calls, f.calls, "no call after Close")
	require.NoError(t, r.Close())
}

// What a card does not tell is unknown: never zero, and never a failure of the rest.
func TestUnknownIsNotZero(t *testing.T) {
	for name, f := range map[string]*fakeDriver{"not supported": cards(2), "total zero": cards(2)} {
		if name == "total zero" {
			f.mem[1] = Memory{}
		} else {
			f.mem[1], f.memErr[1] = Memory{}, faultNotSupported
		}
		f.utilErr, f.eccErr, f.procErr = faultNotSupported, faultNotSupported, faultPermission
		r := openFake(t, f, Config{Devices: "all"})
		got, err := r.Read()
		require.NoError(t, err)
		assert.Zero(t, got.Memory.Total, "%s: half a sum is no sum", name)
		assert.Zero(t, got.Fullest.Total, name)
		assert.Contains(t, got.Unknown, "GPU 1", name)
		assert.NotZero(t, got.Devices[0].Memory.Total)
		for _, d := range got.Devices {
			assert.Nil(t, d.Utilization)
			assert.Nil(t, d.ECC)
			assert.Nil(t, d.Processes)
			assert.Nil(t, d.Foreign)
		}
		assert.Empty(t, got.Trouble)
		_ = r.Close()
	}
	_, known := Memory{}.Free()
	assert.False(t, known)
}

func TestAmbiguousIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tells, asked := false, 0
		r := openFake(t, cards(3), Config{Finders: []Finder{{Method: "later", Find: func() ([]string, error) {
			asked++
			if !tells {
				return nil, errors.New("engine not up yet")
			}
			return []string{"GPU-c"}, nil
		}}}})
		for range 3 {
			_, err := r.Read()
			a, ok := errors.AsType[*Ambiguous](err)
			require.True(t, ok, err)
			assert.Equal(t, 3, a.Cards)
			assert.Contains(t, err.Error(), "cannot tell which of 3 cards is ours")
			assert.Contains(t, err.Error(), "engine not up yet")
		}
		assert.Equal(t, 1, asked, "not every second")
		tells = true
		time.Sleep(askAgain)
		got, err := r.Read()
		require.NoError(t, err)
		assert.Equal(t, "GPU-c0000000", got.Devices[0].UUID)
		assert.Equal(t, "later", got.Method)
		require.NoError(t, r.Close())
	})
}

// Process ids of another name space say nothing about whose they are.
func TestForeignProcessesOfAnotherNameSpace(t *testing.T) {
	f := cards(1)
	f.procs = []Process{{PID: 4000}, {PID: 4001}}
	r := openFake(t, f, Config{OwnPID: func(uint32) bool { return false }})
	got, err := r.Read()
	require.NoError(t, err)
	assert.Nil(t, got.Devices[0].Foreign)
	assert.Len(t, got.Devices[0].Processes, 2)
	assert.Empty(t, got.Warnings)
}

func TestThrottleAndForeignProcesses(t *testing.T) {
	f := cards(1)
	f.bits = 0x1 | 0x2 | 0x4 | 0x40
	f.procs = []Process{{PID: 1}, {PID: 2}, {PID: 3}}
	r := openFake(t, f, Config{OwnPID: func(p uint32) bool { return p == 1 }})
	defer func() { _ = r.Close() }()
	got, err := r.Read()
	require.NoError(t, err)
	assert.Equal(t, []string{"power_cap", "hw_thermal"}, got.Devices[0].Throttle)
	assert.Equal(t, new(2), got.Devices[0].Foreign)
	assert.Equal(t, []string{"GPU 0 is throttled: hw_thermal", "GPU 0 is used by 2 other processes"}, got.Warnings)
	assert.Empty(t, got.Trouble, "slow is not broken")
}

// Old errors are history, new ones trouble for ten minutes; rows that cannot be replaced are trouble for good.
func TestECC(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := cards(1)
		f.state = eccState{uncorrected: 3}
		r := openFake(t, f, Config{})
		read := func() Reading {
			got, err := r.Read()
			require.NoError(t, err)
			return got
		}
		assert.Empty(t, read().Trouble)
		f.set(func(f *fakeDriver) { f.state = eccState{uncorrected: 5, pending: true} })
		got := read()
		assert.Equal(t, []string{"GPU 0: 2 new uncorrected memory errors"}, got.Trouble)
		assert.Equal(t, []string{"GPU 0 replaces memory at its next reset"}, got.Warnings)
		time.Sleep(troubleFor - time.Second)
		assert.NotEmpty(t, read().Trouble)
		time.Sleep(2 * time.Second)
		assert.Empty(t, read().Trouble, "every mark ends by the clock")
		f.set(func(f *fakeDriver) { f.state.failed = true })
		time.Sleep(time.Hour)
		assert.Equal(t, []string{"GPU 0: bad memory rows could not be replaced"}, read().Trouble)
		require.NoError(t, r.Close())
	})
}

func TestXID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := cards(2)
		r := openFake(t, f, Config{Devices: "1"})
		read := func() []string {
			got, err := r.Read()
			require.NoError(t, err)
			return got.Trouble
		}
		assert.Empty(t, read())
		f.events <- [2]uint64{1, 13} // an application's own fault
		f.events <- [2]uint64{0, 79} // somebody else's card
		synctest.Wait()
		assert.Empty(t, read())
		f.events <- [2]uint64{1, 79}
		synctest.Wait()
		assert.Equal(t, []string{"GPU 1: XID 79 (card fell off the bus)"}, read())
		time.Sleep(troubleFor + time.Second)
		assert.Empty(t, read())
		require.NoError(t, r.Close()) // ends the goroutine of the events, or the bubble would not end
	})
}

func TestLostCard(t *testing.T) {
	for _, lost := range []fault{faultLost, faultReset} {
		f := cards(2)
		f.memErr[1] = lost
		r := openFake(t, f, Config{Devices: "all"})
		got, err := r.Read()
		require.NoError(t, err, "the agent goes on")
		assert.Equal(t, []string{"GPU 1: " + lost.Error()}, got.Trouble)
		assert.Zero(t, got.Memory.Total)
		_ = r.Close()
	}
}

// A driver that goes away after hours, or whose library no longer fits it, is never called again.
func TestDriverVanishes(t *testing.T) {
	for _, gone := range []fault{faultUninitialized, faultNoDriver, faultMismatch} {
		f := cards(1)
		r := openFake(t, f, Config{})
		_, err := r.Read()
		require.NoError(t, err)
		f.set(func(f *fakeDriver) { f.err = gone })
		_, err = r.Read()
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorIs(t, err, gone)
		calls := f.calls
		for range 3 {
			_, err = r.Read()
			require.ErrorIs(t, err, ErrUnavailable)
		}
		assert.Equal(t, calls, f.calls)
		require.NoError(t, r.Close())
		assert.False(t, f.closed, "not even to end it")
	}
}

// A hung driver blocks neither Read nor Close for long, and is asked by one goroutine only.
func TestHungDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := cards(1)
		r := openFake(t, f, Config{})
		_, err := r.Read()
		require.NoError(t, err)
		hang := make(chan struct{})
		f.set(func(f *fakeDriver) { f.hang, f.calls = hang, 0 })
		for range 3 {
			start := time.Now()
			_, err = r.Read()
			require.ErrorContains(t, err, "does not answer")
			assert.Equal(t, answerWithin, time.Since(start))
		}
		assert.Equal(t, 1, f.count())
		f.set(func(f *fakeDriver) { f.hang = nil })
		close(hang)
		synctest.Wait()
		_, err = r.Read()
		require.NoError(t, err, "it came back")

		hang = make(chan struct{})
		f.set(func(f *fakeDriver) { f.hang = hang })
		_, err = r.Read()
		require.Error(t, err)
		start := time.Now()
		require.Error(t, r.Close())
		assert.Equal(t, answerWithin, time.Since(start))
		assert.False(t, f.closed, "not while a call is under way")
		close(hang)
		synctest.Wait()
		assert.True(t, f.closed)
	})
}

func TestHungInit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := cards(1)
		hang := make(chan struct{})
		_, err := open(Config{}, func() (driver, error) {
			<-hang
			return f, nil
		})
		require.ErrorIs(t, err, ErrUnavailable)
		close(hang)
		synctest.Wait()
		assert.True(t, f.closed)
		assert.Zero(t, f.calls)
	})
}

func TestOpenErrors(t *testing.T) {
	_, err := open(Config{Devices: "first"}, func() (driver, error) { return nil, errors.New("not reached") })
	require.ErrorContains(t, err, "GRAPEVINE_GPU_DEVICES")
	_, err = open(Config{}, func() (driver, error) { return nil, ErrUnavailable })
	require.ErrorIs(t, err, ErrUnavailable)
}

func TestC70UnifiedMemory(t *testing.T) {
	proc := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(proc, "meminfo"), []byte("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\n"), 0o600))
	f := cards(1)
	f.units[0].name = "NVIDIA GB10"
	f.memErr[0] = faultNotSupported
	r := openFake(t, f, Config{proc: proc})
	got, err := r.Read()
	require.NoError(t, err)
	assert.Equal(t, Memory{Used: 600 << 10, Total: 1000 << 10}, got.Memory)
	assert.True(t, got.Unified)
	_ = r.Close()

	r = openFake(t, f, Config{proc: t.TempDir()})
	got, err = r.Read()
	require.NoError(t, err)
	assert.Zero(t, got.Memory.Total)
	assert.NotEmpty(t, got.Unknown)
	_ = r.Close()
}

// On a host without a card the real thing answers ErrUnavailable, in every build, and the process lives.
func TestC68RealOpenWithoutDriver(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("this host has a driver")
	}
	for range 2 {
		r, err := Open(Config{Devices: "0"})
		require.ErrorIs(t, err, ErrUnavailable)
		require.Nil(t, r)
		t.Log(err)
	}
}

// C69: NVML that answers each call with an unknown error, as after a reset elsewhere, makes values unknown and no more; when
// it answers again they are back. It is not started anew for that, since it never ended; only a driver that is gone is not
// asked again, as asking it kills the process (TestDriverVanishes), and then a restart of the agent brings it back.
func TestC69UnknownErrorsPass(t *testing.T) {
	f := cards(1)
	opened := 0
	r, err := open(Config{}, func() (driver, error) { opened++; return f, nil })
	require.NoError(t, err)
	for range 100 {
		got, err := r.Read()
		require.NoError(t, err)
		require.NotZero(t, got.Memory.Total)
	}
	f.set(func(f *fakeDriver) { f.err = faultUnknown })
	for range 10 {
		got, err := r.Read()
		if err == nil {
			assert.NotEmpty(t, got.Unknown, "the reason is told")
		}
		assert.Zero(t, got.Memory.Total, "unknown, and not the last value")
		assert.Empty(t, got.Trouble, "no fault of the replica")
	}
	f.set(func(f *fakeDriver) { f.err = nil })
	got, err := r.Read()
	require.NoError(t, err)
	assert.NotZero(t, got.Memory.Total)
	assert.Equal(t, 1, opened)
	require.NoError(t, r.Close())
}
